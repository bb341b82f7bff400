"""Recordings for ``--data-path sample`` where a model takes events: the digits moved before a simulated camera."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from megasnn.cache import build_once, cache_folder
from megasnn.data.event_files import EVENTS, encode_events
from megasnn.events import simulate_recording
from megasnn.preprocess.image_sets import find_digits, read_digits
from megasnn.preprocess.writing import Sample, write_shard

_FOLDER = "digits-events-v2"  # change it when the bytes below change
_SEED = 0


def sample_event_shards() -> tuple[Path, Path]:
    """The train and the validation shard, recorded on first use. Safe when many processes call it at once.

    34 x 34 pixels and 0.3 s, as in N-MNIST; the same split as the images of the digits, and kept as events, so that
    any number of time steps can be made of them.
    """
    folder = cache_folder(_FOLDER)
    train, valid = (build_once(folder / f"{split}-00000.tar", partial(_write, split)) for split in ("train", "valid"))
    return train, valid


def _write(split: str, path: Path) -> None:
    write_shard(path, _recordings(split))


def _recordings(split: str) -> Iterator[Sample]:
    scans, _ = read_digits()
    items = find_digits().splits[split]
    for item in tqdm(items, f"recording digits ({split})", unit=" samples", disable=None, leave=False):
        recording = simulate_recording(scans[item.part[0]] / np.float64(16), "digits", _SEED, item.part[0])
        yield item.key, {EVENTS: encode_events(recording), "cls": str(item.label).encode()}
