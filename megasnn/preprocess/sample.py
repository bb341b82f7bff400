"""The data of ``--data-path sample``: scikit-learn's bundled digits as webdataset shards, without a download.

1,797 scans of handwritten digits, 8 × 8 pixels, 17 grey levels (UCI "Optical Recognition of Handwritten
Digits", test part). Every fifth sample of each class is held out: 1,442 train, 355 validate.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from megasnn.cache import build_once, cache_folder
from megasnn.preprocess.image_sets import encode_digit, find_digits
from megasnn.preprocess.sample_events import sample_event_shards
from megasnn.preprocess.writing import write_shard

_FOLDER = "digits-v2"  # change it when the bytes change


def sample_shards() -> tuple[Path, Path]:
    """The train and the validation shard, written on first use. Safe when many processes call it at once."""
    folder = cache_folder(_FOLDER)
    train, valid = (build_once(folder / f"{split}-00000.tar", partial(_write, split)) for split in ("train", "valid"))
    return train, valid


def shards_of_sample(events: bool) -> tuple[Path, Path]:
    """What ``--data-path sample`` stands for: the digits, as recordings of an event camera or as images."""
    return sample_event_shards() if events else sample_shards()


def _write(split: str, path: Path) -> None:
    items = find_digits().splits[split]
    write_shard(path, ((item.key, {**encode_digit(item), "cls": str(item.label).encode()}) for item in items))
