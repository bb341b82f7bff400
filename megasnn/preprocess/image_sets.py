"""CIFAR-10 as it is downloaded, folders of images (as ImageNet's are), and scikit-learn's digits."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from megasnn.data.images import open_image
from megasnn.files.pickles import Inert, read_pickle
from megasnn.files.sample_size import SAMPLE_BYTES, read_file
from megasnn.preprocess.folders import require_folder, splits_of_classes
from megasnn.preprocess.items import Item, Listing

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".ppm")
CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()
SPLITS = ("train", "val", "test")
_CIFAR10_FOLDER = "cifar-10-batches-py"
_CIFAR10_FILES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
_BATCH_BYTES = 64 << 20  # twice the size of the files as they are published
_NUMPY_MODULES = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray", "_codecs")
_QUALITY = 95


def find_image_folder(folder: Path, class_list: Path | None) -> Listing:
    """`<split>/<class>/*.jpg` with splits train, val and test, as far as they exist; or `<class>/*.jpg`, all training.

    Raises:
        ValueError: folders are missing or empty; a split has other classes than the first one.
    """
    require_folder(folder, "a folder of images for each class, perhaps below train and val")
    folders = {split: folder / split for split in SPLITS if (folder / split).is_dir()} or {"train": folder}
    return Listing(*splits_of_classes(folders, class_list, IMAGE_SUFFIXES))


@dataclass(frozen=True)
class CopyImage:
    """Takes an image file over as it is, or scaled.

    Attributes:
        size: pixels that the shorter side is scaled to where it is longer; the file is then written anew.
        check: decode every image, so that one that cannot be is found now and not in training.
        limit: bytes that an image may take, in its file or decoded.
    """

    size: int | None = None
    check: bool = True
    limit: int = SAMPLE_BYTES

    def __call__(self, item: Item) -> Mapping[str, bytes]:
        suffix = item.source.suffix.lower().removeprefix(".")
        try:
            data = read_file(item.source, self.limit)
        except ValueError as error:
            raise ValueError(f"{item.source} cannot be read: {error}") from None
        if not self.check and self.size is None:
            return {suffix: data}
        try:
            image = open_image(data, self.limit)
            image.load()
        except MemoryError:
            raise
        except Exception as error:  # Pillow has no common class for what damaged bytes make it raise
            raise ValueError(f"{item.source} cannot be decoded: {error}") from error
        if self.size is None or min(image.size) <= self.size:
            return {suffix: data}
        scale = self.size / min(image.size)
        width, height = (max(self.size, round(side * scale)) for side in image.size)
        image = image if image.mode in ("L", "RGB") else image.convert("RGB")
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        return {"jpg": _encode(image, "JPEG", quality=_QUALITY)} if suffix != "png" else {"png": _encode(image, "PNG")}


def find_cifar10(folder: Path) -> Listing:
    """The Python version of CIFAR-10 (data_batch_1 ... test_batch), or its images in class folders.

    Raises:
        ValueError: neither is there, or a file is missing or damaged.
    """
    require_folder(folder, f"{_CIFAR10_FOLDER}, or train and test with a folder for each class,")
    packed = folder / _CIFAR10_FOLDER if (folder / _CIFAR10_FOLDER).is_dir() else folder
    if not (packed / "data_batch_1").exists():
        return find_image_folder(folder, None)
    splits = {}
    for split, names in _CIFAR10_FILES.items():
        splits[split] = [
            Item(f"{split}_{CIFAR10_CLASSES[label]}_{number}_{row:04d}", label, packed / name, (row,))
            for number, name in enumerate(names, 1)
            for row, label in enumerate(_read_batch(packed / name)[1])
        ]
    return Listing(splits, CIFAR10_CLASSES)


@dataclass(frozen=True)
class EncodeCifar10:
    """One row of a CIFAR-10 file as PNG; an image file as it is.

    Attributes:
        limit: bytes that an image may take, in its file or decoded.
    """

    limit: int = SAMPLE_BYTES

    def __call__(self, item: Item) -> Mapping[str, bytes]:
        return _encode_row(item) if item.part else CopyImage(limit=self.limit)(item)


def _encode_row(item: Item) -> Mapping[str, bytes]:
    pixels = _read_batch(item.source)[0][item.part[0]].reshape(3, 32, 32).transpose(1, 2, 0)
    return {"png": _encode(Image.fromarray(pixels), "PNG", compress_level=1)}


@lru_cache(maxsize=1)  # the rows of a file come one after another
def _read_batch(path: Path) -> tuple[np.ndarray, list[int]]:
    """(pixels uint8 [n, 3072], labels) of one of CIFAR-10's files."""
    try:
        content = read_pickle(read_file(path, _BATCH_BYTES), _NUMPY_MODULES)
        if type(content) is not dict or type(labels := content.get(b"labels")) is not list:
            raise ValueError("it has no labels")
        pixels = _array(content.get(b"data"))
        if pixels.shape != (len(labels), 3072) or not all(type(label) is int and 0 <= label < 10 for label in labels):
            raise ValueError(f"pixels {pixels.shape} with {len(labels)} labels, which are numbers from 0 to 9")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is missing, cut or none of CIFAR-10's files ({error})") from error
    return pixels, labels


def _array(value: Any) -> NDArray[np.uint8]:
    """The array of uint8, of one dimension or two, that an object in a pickle is. Raises ValueError for any other."""
    if type(value) is not Inert or not value.name.endswith("._reconstruct") or type(value.state) is not list:
        raise ValueError(f"{type(value).__name__} where an array should be")
    _, shape, dtype, fortran, content = value.state
    arguments = dtype.arguments if type(dtype) is Inert else None
    if type(arguments) is not list or arguments[:1] not in (["u1"], [b"u1"]):
        raise ValueError("an array is not of uint8")
    if type(content) is not bytes or fortran not in (False, 0):
        raise ValueError("an array is not in the usual order")
    if type(shape) is not list or len(shape) not in (1, 2) or any(type(side) is not int or side < 0 for side in shape):
        raise ValueError("an array has no shape")
    if math.prod(shape) != len(content):
        raise ValueError(f"an array of {math.prod(shape)} bytes has {len(content)}")
    return np.frombuffer(content, np.uint8).reshape(shape)


def find_digits() -> Listing:
    """scikit-learn's digits; every fifth of each class, in their order, is held out for validation."""
    _, labels = read_digits()
    held_out = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        held_out[np.flatnonzero(labels == label)[4::5]] = True
    splits = {
        split: [
            Item(f"digit_{row:04d}", int(labels[row]), Path("digits", str(row)), (row,))
            for row in np.flatnonzero(chosen).tolist()
        ]
        for split, chosen in (("train", ~held_out), ("valid", held_out))
    }
    return Listing(splits, [str(label) for label in range(10)])


@lru_cache(maxsize=1)
def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """(scans uint8 [1797, 8, 8] with levels 0..16, classes): the test part of UCI's handwritten digits."""
    from sklearn.datasets import load_digits

    scans, labels = load_digits(return_X_y=True)
    return scans.reshape(-1, 8, 8).astype(np.uint8), labels


def encode_digit(item: Item) -> Mapping[str, bytes]:
    """A digit as grey PNG, stored rather than compressed: the bytes then do not depend on the zlib at hand."""
    scan = read_digits()[0][item.part[0]]
    pixels = np.rint(scan * (255 / 16)).astype(np.uint8)
    return {"png": _encode(Image.fromarray(pixels), "PNG", compress_level=0)}


def _encode(image: Image.Image, kind: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
