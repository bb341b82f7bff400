"""Samples of the usual data sets: files, classes, splits and keys; and a sample's files in a shard.

All functions raise ValueError naming a missing, empty or invalid file or folder.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image

from megasnn.common.files import quantity, read_file, require_regular
from megasnn.data.events import RECORDING_SUFFIXES, FrameOptions, Recording, TimeUnit, make_frames, read_recording
from megasnn.data.formats import EVENTS, FRAMES, encode_events, encode_frames
from megasnn.data.images import IMAGE_SUFFIXES, open_image
from megasnn.data.preprocess.folders import class_names, files_of, split_folders

GESTURES = (
    "hand_clapping",
    "right_hand_wave",
    "left_hand_wave",
    "right_arm_clockwise",
    "right_arm_counter_clockwise",
    "left_arm_clockwise",
    "left_arm_counter_clockwise",
    "arm_roll",
    "air_drums",
    "air_guitar",
    "other_gestures",
)
_TRIALS = "trials_to_{}.txt"
_TRAIN_FRACTION = 0.9  # as the literature splits CIFAR10-DVS
_STORED_AS = {"jfif": "jpg", "pbm": "ppm", "pgm": "ppm", "pnm": "ppm"}  # other endings of formats for training
_CONVERTED = {"bmp": "BMP", "gif": "GIF", "tif": "TIFF", "tiff": "TIFF"}  # to PNG, since training does not decode them
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
_IMAGES = tuple(f".{suffix}" for suffix in (*IMAGE_SUFFIXES, *_STORED_AS, *_CONVERTED))
_PIXELS = 3 * 32 * 32


class CifarFiles(NamedTuple):
    """Files of a binary CIFAR version, and labels per row."""

    folder: str
    classes: str
    splits: dict[str, list[str]]
    labels: int


_CIFAR = {
    10: CifarFiles(
        "cifar-10-batches-bin",
        "batches.meta.txt",
        {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "test": ["test_batch.bin"]},
        labels=1,
    ),
    100: CifarFiles(
        "cifar-100-binary", "fine_label_names.txt", {"train": ["train.bin"], "test": ["test.bin"]}, labels=2
    ),
}


@dataclass(frozen=True)
class Item:
    """A sample to write.

    Attributes:
        key: name in the shard, unique in its split, without dots (a webdataset key ends at the first).
        part: row and number of labels, or first and last time in microseconds; empty for a whole source.
    """

    key: str
    label: int
    source: Path
    part: tuple[int, ...] = ()


@dataclass(frozen=True)
class Listing:
    """Items by split, and class names by number. Raises ValueError for an empty split."""

    splits: dict[str, list[Item]]
    classes: list[str]

    def __post_init__(self) -> None:
        for split, items in self.splits.items():
            if not items:
                raise ValueError(f"there are no samples for the split {split!r}")

    def with_unique_keys(self) -> Listing:
        """The listing with keys unique in each split."""
        # Before, `1.jpg` and `1.png` have one key.
        return replace(self, splits={split: _with_unique_keys(items) for split, items in self.splits.items()})

    def numbered_as(self, classes: Sequence[str]) -> Listing:
        """The listing with the class numbers of `classes`, which must contain all."""
        missing = [name for name in self.classes if name not in classes]
        if missing:
            raise ValueError(f"--classes-of: its list of classes has no {', '.join(map(repr, missing[:5]))}")
        numbers = [classes.index(name) for name in self.classes]
        splits: dict[str, list[Item]] = {}
        for split, items in self.splits.items():
            splits[split] = [replace(item, label=numbers[item.label]) for item in items]
        return Listing(splits, list(classes))


def _with_unique_keys(items: Sequence[Item]) -> list[Item]:
    """Items with a number after each key that an earlier item has."""
    taken = {item.key for item in items}
    numbers = dict[str, int]()
    unique = []
    for item in items:
        key = item.key
        number = numbers.get(key, 0) + 1
        if number > 1:
            # A key with a number may itself be another item's key.
            number = next(each for each in count(number) if f"{item.key}_{each}" not in taken)
            key = f"{item.key}_{number}"
        numbers[item.key] = number
        taken.add(key)
        unique.append(replace(item, key=key))
    return unique


def list_cifar(folder: Path, classes: Literal[10, 100]) -> Listing:
    """Binary version of CIFAR-10, or of CIFAR-100 with its fine classes."""
    # The Python version contains pickles, which are not read.
    files = _CIFAR[classes]
    if (folder / files.folder).is_dir():
        folder = folder / files.folder
    if not (folder / files.classes).is_file():
        raise ValueError(
            f"{folder} has no {files.classes}: unpack the binary version of CIFAR-{classes} there ({files.folder})"
        )
    class_names = _lines(folder / files.classes)
    splits: dict[str, list[Item]] = {}
    for split, names in files.splits.items():
        items = splits[split] = []
        for number, name in enumerate(names):
            path = folder / name
            # One byte for each label (CIFAR-100: coarse, fine), then the pixels.
            labels = cifar_rows(path, files.labels)[:, files.labels - 1].tolist()
            for row, label in enumerate(labels):
                key = f"{split}_{class_names[label]}_{number}_{row:05d}"
                items.append(Item(key, label, path, (row, files.labels)))
    return Listing(splits, class_names)


# Consecutive items have rows of one file.
@lru_cache(maxsize=1)
def cifar_rows(path: Path, labels: int) -> np.ndarray:
    """Rows of a CIFAR file, uint8 [n, labels + 3072], memory-mapped."""
    try:
        require_regular(path)
        return np.memmap(path, np.uint8, "r").reshape(-1, labels + _PIXELS)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is missing, cut, or no CIFAR file ({error})") from error


def list_image_folders(folder: Path) -> Listing:
    """`<split>/<class>/*.jpg` for train, val and test; or `<class>/*.jpg`, all training. Subfolders are searched."""
    return _list_classes(split_folders(folder) or {"train": folder}, _IMAGES)


def list_tiny_imagenet(folder: Path) -> Listing:
    """`train/<wnid>/images/*`, and `val/images/*` with the classes of `val/val_annotations.txt`."""
    classes = class_names(folder / "train")
    train = []
    for label, wnid in enumerate(classes):
        images = folder / "train" / wnid / "images"
        train += [Item(_key(path, wnid, images), label, path) for path in files_of(images, _IMAGES)]
    val = []
    annotations = folder / "val" / "val_annotations.txt"
    for line in _lines(annotations):
        name, wnid = (*line.split("\t"), "")[:2]
        path = folder / "val" / "images" / name
        if wnid not in classes or not path.is_file():
            raise ValueError(f"{annotations}: {line!r} names no file in val/images, or no class of train")
        val.append(Item(_key(path, wnid, path.parent), classes.index(wnid), path))
    return Listing({"train": train, "val": val}, classes)


def list_event_folders(folder: Path) -> Listing:
    """`<split>/<class>/*`; or `<class>/*`, where the first 90 % in each class train, in numeric order."""
    if folders := split_folders(folder):
        return _list_classes(folders, RECORDING_SUFFIXES)
    classes = class_names(folder)
    splits: dict[str, list[Item]] = {"train": [], "test": []}
    for name, items in zip(classes, _items(folder, classes, RECORDING_SUFFIXES), strict=True):
        # By class, so that both splits have every class.
        trained = round(_TRAIN_FRACTION * len(items))
        if not 0 < trained < len(items):
            raise ValueError(
                f"class {name!r} has {quantity(len(items), 'recording')}, too few for a split; make folders train and "
                "test"
            )
        splits["train"] += items[:trained]
        splits["test"] += items[trained:]
    return Listing(splits, classes)


def list_gestures(folder: Path) -> Listing:
    """DVS128 Gesture: clips from the recordings in `trials_to_*.txt`; without these files, a folder per class."""
    if not (folder / _TRIALS.format("train")).is_file():
        return list_event_folders(folder)
    splits: dict[str, list[Item]] = {"train": [], "test": []}
    for split, items in splits.items():
        for name in _lines(folder / _TRIALS.format(split)):
            items += _clips(folder / name)
    return Listing(splits, list(GESTURES))


def _clips(recording: Path) -> list[Item]:
    labels = recording.with_name(f"{recording.stem}_labels.csv")
    if not recording.is_file():
        problem = "is no regular file" if recording.exists() else "does not exist"
        raise ValueError(f"{recording} {problem}, and a list of trials names it")
    # A clip: class from 1 on, first and last time in microseconds.
    clips: list[Item] = []
    for line in _lines(labels)[1:]:
        try:
            gesture, start, end = map(int, line.split(",")[:3])
        except ValueError:
            gesture = start = end = 0
        if not 1 <= gesture <= len(GESTURES) or not 0 <= start < end < 1 << 62:
            raise ValueError(f"{labels}: {line!r} is no class from 1 to {len(GESTURES)} with first and last time")
        key = _key(recording, GESTURES[gesture - 1], recording.parent)
        clips.append(Item(f"{key}_{len(clips):02d}", gesture - 1, recording, (start, end)))
    return clips


def _list_classes(folders: Mapping[str, Path], suffixes: Sequence[str]) -> Listing:
    """Listing for splits with a folder per class; the first split has all classes."""
    first = next(iter(folders.values()))
    classes = class_names(first)
    splits: dict[str, list[Item]] = {}
    for split, folder in folders.items():
        unknown = sorted(set(class_names(folder)) - set(classes))
        if unknown:
            raise ValueError(f"{folder} has folders that are missing in {first}: {', '.join(unknown[:5])}")
        splits[split] = []
        for items in _items(folder, classes, suffixes):
            splits[split] += items
    return Listing(splits, classes)


def _items(folder: Path, classes: Sequence[str], suffixes: Sequence[str]) -> list[list[Item]]:
    found = []
    for label, name in enumerate(classes):
        files = files_of(folder / name, suffixes)
        found.append([Item(_key(path, name, folder / name), label, path) for path in files])
    return found


def _key(path: Path, class_name: str, folder: Path) -> str:
    """Class and path below the folder; the class only once."""
    name = "_".join(path.relative_to(folder).with_suffix("").parts)
    if not (class_name + name).isprintable():
        raise ValueError(f"the name of {str(path)!r} is not UTF-8, or has control characters; rename it")
    name = name.replace(".", "_")
    class_name = class_name.replace(".", "_")
    return name if name.startswith(f"{class_name}_") else f"{class_name}_{name}"


def _lines(path: Path) -> list[str]:
    try:
        lines = read_file(path).decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as text: {error}") from None
    return [line.strip() for line in lines if line.strip()]


def encode_image(image: Image.Image, kind: str, **options: int) -> bytes:
    """An image file's bytes; `kind` is a Pillow format."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def encode_cifar(item: Item) -> Mapping[str, bytes]:
    """A CIFAR row as PNG."""
    row, labels = item.part
    pixels = cifar_rows(item.source, labels)[row, labels:].reshape(3, 32, 32).transpose(1, 2, 0)
    return {"png": encode_image(Image.fromarray(pixels), "PNG", compress_level=1)}


def copy_image(item: Item) -> Mapping[str, bytes]:
    """An image file unchanged, or as PNG if training does not decode its format. Raises ValueError."""
    suffix = item.source.suffix.lower().removeprefix(".")
    try:
        data = read_file(item.source)
        image = open_image(data, _CONVERTED.get(suffix))
        if suffix not in _CONVERTED:
            # The bytes are copied, but only decoding shows damage.
            image.load()
            return {_STORED_AS.get(suffix, suffix): data}
        images = getattr(image, "n_frames", 1)
        if images > 1:
            raise ValueError(f"it holds {images} images; save one of them")
        image.load()
        if image.mode not in _PNG_MODES:
            image = image.convert("RGB")
        return {"png": encode_image(image, "PNG", compress_level=1)}
    except MemoryError:
        raise
    except Exception as error:
        # Pillow has no common error class.
        raise ValueError(f"{item.source} cannot be decoded: {error}") from error


@dataclass(frozen=True)
class Reading:
    """Arguments for `read_recording`."""

    sensor_size: tuple[int, int] | None
    sort: bool
    time_unit: TimeUnit | None
    transpose_dvs128: bool


def encode_recording(item: Item, frames: FrameOptions | None, reading: Reading) -> Mapping[str, bytes]:
    """A recording's or clip's frames, or its events without options for `frames`."""
    recording = _read(item.source, reading)
    if item.part:
        recording = Recording(recording.events.between(*item.part), recording.sensor)
        if not len(recording.events):
            raise ValueError(f"{item.source}: no events in the clip from {item.part[0]} to {item.part[1]} us")
    if frames is None:
        return {EVENTS: encode_events(recording)}
    try:
        return {FRAMES: encode_frames(make_frames(recording, frames))}
    except ValueError as error:
        raise ValueError(f"{item.source}: {error}") from error


# Consecutive items have clips of one recording.
@lru_cache(maxsize=1)
def _read(path: Path, reading: Reading) -> Recording:
    return read_recording(path, reading.sensor_size, reading.sort, reading.time_unit, reading.transpose_dvs128)
