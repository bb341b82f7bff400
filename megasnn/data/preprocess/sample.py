"""Data of ``--data-path sample``: scikit-learn's bundled digits as webdataset shards, without a download.

1,797 scans, 8 × 8 pixels, 17 grey levels (UCI "Optical Recognition of Handwritten Digits", test part): 1,442 train,
355 validate. For event models, a simulated camera records them.
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

# Folders in the cache: raise the version when the bytes change.
_IMAGES = "digits-v2"
_EVENTS = "digits-events-v3"


def shards_of_sample(events: bool) -> tuple[Path, Path]:
    """Train and validation shard, written on first use: images, or recordings (34 x 34 pixels, 0.3 s)."""
    folder = cache_folder(_EVENTS if events else _IMAGES)

    def write(split: str, path: Path) -> None:
        write_shard(path, digit_samples(split, events))

    train = build_once(folder / "train-00000.tar", partial(write, "train"))
    valid = build_once(folder / "valid-00000.tar", partial(write, "valid"))
    return train, valid


def digit_samples(split: str, events: bool) -> Iterator[tuple[str, Mapping[str, bytes]]]:
    """Yields key and files for each digit in train or valid."""
    scans, labels = read_digits()
    held_out = np.zeros(len(labels), bool)
    for label in range(10):
        # Every fifth sample of each class.
        held_out[np.flatnonzero(labels == label)[4::5]] = True
    chosen = np.flatnonzero(held_out if split == "valid" else ~held_out).tolist()
    for row in tqdm(chosen, f"digits ({split})", unit=" samples", disable=None, leave=False):
        if events:
            recording = simulate_recording(scans[row] / np.float64(16), "digits", 0, row)
            files = {EVENTS: encode_events(recording)}
        else:
            # Uncompressed, since compressed bytes depend on zlib's version.
            pixels = np.rint(scans[row] * (255 / 16)).astype(np.uint8)
            files = {"png": encode_image(Image.fromarray(pixels), "PNG", compress_level=0)}
        yield f"digit_{row:04d}", {**files, "cls": str(labels[row]).encode()}


@lru_cache(maxsize=1)
def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Scans uint8 [1797, 8, 8] with levels 0..16, and classes."""
    from sklearn.datasets import load_digits

    scans, labels = load_digits(return_X_y=True)
    return scans.reshape(-1, 8, 8).astype(np.uint8), labels
