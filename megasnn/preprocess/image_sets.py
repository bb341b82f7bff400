"""Data sets of images: folders as ImageNet's, Tiny-ImageNet, CIFAR-10 and CIFAR-100; what is written for an image."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from megasnn.data.images import IMAGE_SUFFIXES, open_image
from megasnn.files import SAMPLE_BYTES, read_file
from megasnn.preprocess.sources import (
    Item,
    Listing,
    class_names,
    files_of,
    inside,
    key_of,
    list_classes,
    read_lines,
    split_folders,
)

_SUFFIXES = tuple(f".{suffix}" for suffix in IMAGE_SUFFIXES)
_PIXELS = 3 * 32 * 32

# Folder, names of the classes, files of each split, labels in front of the pixels.
_CIFAR = {
    10: (
        "cifar-10-batches-bin",
        "batches.meta.txt",
        {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "test": ["test_batch.bin"]},
        1,
    ),
    100: ("cifar-100-binary", "fine_label_names.txt", {"train": ["train.bin"], "test": ["test.bin"]}, 2),
}
_QUALITY = 95


def list_cifar(folder: Path, classes: Literal[10, 100]) -> Listing:
    """Rows of the binary version of CIFAR-10, or of CIFAR-100 with its fine classes.

    A row has one byte for each label (CIFAR-100: coarse, fine) and 3 x 32 x 32 for the pixels.

    Raises:
        ValueError: a file is missing or cut, or has a label without a name. The Python version is refused: it holds
            pickles, which could run code.
    """
    name, names, files, labels = _CIFAR[classes]
    folder = folder / name if (folder / name).is_dir() else folder
    if not (folder / names).is_file():
        raise ValueError(
            f"{folder} has no {names}: unpack the binary version of CIFAR-{classes} there ({name}); the Python version "
            f"holds pickles, which could run code, and is not read"
        )
    class_names = read_lines(folder / names)
    splits: dict[str, list[Item]] = {}
    for split, paths in files.items():
        splits[split] = []
        for number, path in enumerate(folder / each for each in paths):
            found = _rows(path, labels)[:, labels - 1].tolist()
            if max(found) >= len(class_names):
                raise ValueError(f"{path} has a label {max(found)}, and {names} has {len(class_names)} lines")
            splits[split] += [
                Item(f"{split}_{class_names[label]}_{number}_{row:05d}", label, path, (row, labels))
                for row, label in enumerate(found)
            ]
    return Listing(splits, class_names)


def encode_cifar(item: Item) -> Mapping[str, bytes]:
    """Writes a row of a file of CIFAR as PNG."""
    row, labels = item.part
    pixels = _rows(item.source, labels)[row, labels:].reshape(3, 32, 32).transpose(1, 2, 0)
    return {"png": encode_image(Image.fromarray(pixels), "PNG", compress_level=1)}


@lru_cache(maxsize=1)  # the rows of a file come one after another
def _rows(path: Path, labels: int) -> np.ndarray:
    """Rows of a file, uint8 [n, labels + 3072], mapped into memory."""
    try:
        return np.memmap(path, np.uint8, "r").reshape(-1, labels + _PIXELS)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is missing, cut or none of CIFAR's files ({error})") from error


def list_image_folders(folder: Path) -> Listing:
    """`<split>/<class>/*.jpg` with splits train, val and test, as far as they exist; or `<class>/*.jpg`, all training.

    Raises:
        ValueError: folders are missing or empty; a split has other classes than the first one.
    """
    return list_classes(split_folders(folder) or {"train": folder}, _SUFFIXES)


def list_tiny_imagenet(folder: Path) -> Listing:
    """`train/<wnid>/images/*`, and `val/images/*` by the lines of `val/val_annotations.txt`; its test has no labels.

    Raises:
        ValueError: a file or folder is missing, or the annotations name another class.
    """
    classes = class_names(folder / "train")
    train = [
        Item(key_of(path, wnid), label, path)
        for label, wnid in enumerate(classes)
        for path in files_of(folder / "train" / wnid / "images", _SUFFIXES)
    ]
    val = []
    for line in read_lines(folder / "val" / "val_annotations.txt"):
        name, wnid = (*line.split("\t"), "")[:2]
        path = inside(folder / "val" / "images", name)
        if wnid not in classes or not path.is_file():
            raise ValueError(f"{folder}/val/val_annotations.txt: {line!r} is no file of val/images and class of train")
        val.append(Item(key_of(path, wnid), classes.index(wnid), path))
    return Listing({"train": train, "val": val}, classes)


@dataclass(frozen=True)
class CopyImage:
    """Takes an image file over as it is, or scaled; it is decoded, so that a damaged one is found now.

    Attributes:
        size: pixels that the shorter side is scaled to where it is longer; the file is then written anew.
        limit: bytes that an image may take, in its file or decoded.
    """

    size: int | None = None
    limit: int = SAMPLE_BYTES

    def __call__(self, item: Item) -> Mapping[str, bytes]:
        suffix = item.source.suffix.lower().removeprefix(".")
        try:
            data = read_file(item.source, self.limit)
            image = open_image(data, self.limit)
            image.load()
        except (ValueError, OSError, SyntaxError) as error:  # what damaged bytes make Pillow raise
            raise ValueError(f"{item.source} cannot be decoded: {error}") from error
        if self.size is None or min(image.size) <= self.size:
            return {suffix: data}
        scale = self.size / min(image.size)
        width, height = (max(self.size, round(side * scale)) for side in image.size)
        image = image if image.mode in ("L", "RGB") else image.convert("RGB")
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        if suffix == "png":
            return {"png": encode_image(image, "PNG")}
        return {"jpg": encode_image(image, "JPEG", quality=_QUALITY)}


def encode_image(image: Image.Image, kind: str, **options: int) -> bytes:
    """File of an image, in a format of Pillow's."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
