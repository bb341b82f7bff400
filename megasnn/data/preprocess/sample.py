"""Sample data of ``--data-path sample``: scikit-learn's bundled digits as webdataset shards, without a download.

1,797 scans of handwritten digits, 8 × 8 pixels, 17 grey levels (UCI "Optical Recognition of Handwritten Digits", test
part). Every fifth sample of each class is held out: 1,442 train, 355 validate. For a model that takes events, the
digits are moved before a simulated camera, which records them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from megasnn.common.files import build_once, cache_folder
from megasnn.data.events import simulate_recording
from megasnn.data.formats import EVENTS, encode_events
from megasnn.data.preprocess.sources import encode_image
from megasnn.data.preprocess.writing import write_shard

_IMAGES, _EVENTS = "digits-v2", "digits-events-v3"  # folders in the cache; change them when the bytes change


def shards_of_sample(events: bool) -> tuple[Path, Path]:
    """Train and validation shard, made on first use. Many processes may call it at once.

    Args:
        events: recordings of 34 x 34 pixels and 0.3 s, as in N-MNIST, instead of images; kept as events, so that any
            number of time steps can be made of them.
    """
    folder = cache_folder(_EVENTS if events else _IMAGES)

    def write(split: str, path: Path) -> None:
        write_shard(path, digit_samples(split, events))

    train, valid = (build_once(folder / f"{split}-00000.tar", partial(write, split)) for split in ("train", "valid"))
    return train, valid


def digit_samples(split: str, events: bool) -> Iterator[tuple[str, Mapping[str, bytes]]]:
    """Key and files of each digit of the split train or valid."""
    scans, labels = read_digits()
    held_out = np.zeros(len(labels), bool)
    for label in range(10):
        held_out[np.flatnonzero(labels == label)[4::5]] = True
    chosen = np.flatnonzero(held_out if split == "valid" else ~held_out).tolist()
    for row in tqdm(chosen, f"digits ({split})", unit=" samples", disable=None, leave=False):
        if events:
            recording = simulate_recording(scans[row] / np.float64(16), "digits", 0, row)
            files = {EVENTS: encode_events(recording)}
        else:
            # Stored rather than compressed: the bytes then do not depend on the zlib at hand.
            pixels = np.rint(scans[row] * (255 / 16)).astype(np.uint8)
            files = {"png": encode_image(Image.fromarray(pixels), "PNG", compress_level=0)}
        yield f"digit_{row:04d}", {**files, "cls": str(labels[row]).encode()}


@lru_cache(maxsize=1)
def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """(scans uint8 [1797, 8, 8] with levels 0..16, classes)."""
    from sklearn.datasets import load_digits

    scans, labels = load_digits(return_X_y=True)
    return scans.reshape(-1, 8, 8).astype(np.uint8), labels
