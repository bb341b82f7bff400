"""The data of ``--data-path sample``: scikit-learn's bundled digits as webdataset shards, without a download.

1,797 scans of handwritten digits, 8 × 8 pixels, 17 grey levels (UCI "Optical Recognition of Handwritten
Digits", test part). Every fifth sample of each class is held out: 1,442 train, 355 validate. For a model that takes
events, the digits are moved before a simulated camera, which records them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from megasnn.cache import build_once, cache_folder
from megasnn.data.event_files import EVENTS, encode_events
from megasnn.events import simulate_recording
from megasnn.preprocess.image_sets import encode_digit, find_digits, read_digits
from megasnn.preprocess.writing import Sample, write_shard

_IMAGES, _EVENTS = "digits-v2", "digits-events-v2"  # folders in the cache; change them when the bytes change
_SEED = 0


def shards_of_sample(events: bool) -> tuple[Path, Path]:
    """The train and the validation shard, made on first use. Safe when many processes call it at once.

    Recordings have 34 x 34 pixels and 0.3 s, as in N-MNIST, and the same split as the images. They are kept as events,
    so that any number of time steps can be made of them.

    Args:
        events: recordings of an event camera, instead of images.
    """
    folder = cache_folder(_EVENTS if events else _IMAGES)
    samples = _recordings if events else _images

    def write(split: str, path: Path) -> None:
        write_shard(path, samples(split))

    train, valid = (build_once(folder / f"{split}-00000.tar", partial(write, split)) for split in ("train", "valid"))
    return train, valid


def _images(split: str) -> Iterator[Sample]:
    for item in find_digits().splits[split]:
        yield item.key, {**encode_digit(item), "cls": str(item.label).encode()}


def _recordings(split: str) -> Iterator[Sample]:
    scans, _ = read_digits()
    items = find_digits().splits[split]
    for item in tqdm(items, f"recording digits ({split})", unit=" samples", disable=None, leave=False):
        recording = simulate_recording(scans[item.part[0]] / np.float64(16), "digits", _SEED, item.part[0])
        yield item.key, {EVENTS: encode_events(recording), "cls": str(item.label).encode()}
