"""The data of ``--data-path sample``: scikit-learn's bundled digits as webdataset shards, without a download.

1,797 scans of handwritten digits, 8 × 8 pixels, 17 grey levels (UCI "Optical Recognition of Handwritten
Digits", test part). Every fifth sample of each class is held out: 1,442 train, 355 validate (see `split`).
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from megasnn.data.cache import build_once, cache_folder

_FOLDER = "digits-v1"  # change it when the bytes below change


def sample_shards() -> tuple[Path, Path]:
    """The train and the validation shard, written on first use. Safe when many processes call it at once."""
    folder = cache_folder() / _FOLDER
    train = build_once(folder / "train-00000.tar", lambda path: _write(path, held_out=False))
    valid = build_once(folder / "valid-00000.tar", lambda path: _write(path, held_out=True))
    return train, valid


def split(labels: np.ndarray) -> np.ndarray:
    """bool `[n]`: which samples are held out, every fifth of each class in file order."""
    held_out = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        held_out[np.flatnonzero(labels == label)[4::5]] = True
    return held_out


def _write(path: Path, held_out: bool) -> None:
    """Write one split to `path` with the same bytes every time."""
    from sklearn.datasets import load_digits
    from webdataset import TarWriter

    scans, labels = load_digits(return_X_y=True)
    pixels = np.rint(scans.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    chosen = np.flatnonzero(split(labels) == held_out)
    with open(path, "wb") as file, TarWriter(file, encoder=False, mtime=0) as writer:
        for index in chosen.tolist():
            label = str(labels[index]).encode()
            writer.write({"__key__": f"digit_{index:04d}", "png": _png(pixels[index]), "cls": label})


def _png(pixels: np.ndarray) -> bytes:
    """A grey PNG, stored rather than compressed: the bytes then do not depend on the zlib at hand."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=0)
    return buffer.getvalue()
