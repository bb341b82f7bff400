"""Samples of the usual data sets: files, classes, splits, names in shards, and the files of one sample.

All functions that list raise ValueError, naming it, for a file or folder that is missing, empty or makes no sense.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from megasnn.common.files import read_file
from megasnn.data.events import RECORDING_SUFFIXES, FrameOptions, Recording, TimeUnit, make_frames, read_recording
from megasnn.data.formats import EVENTS, FRAMES, encode_events, encode_frames
from megasnn.data.images import IMAGE_SUFFIXES, open_image
from megasnn.data.preprocess.folders import class_names, files_of, split_folders

GESTURES = (
    "hand_clapping,right_hand_wave,left_hand_wave,right_arm_clockwise,right_arm_counter_clockwise,left_arm_clockwise,"
    "left_arm_counter_clockwise,arm_roll,air_drums,air_guitar,other_gestures"
).split(",")
_TRIALS = "trials_to_{}.txt"
_TRAIN_SHARE = 0.9  # as the literature splits CIFAR10-DVS
_STORED_AS = {"jfif": "jpg", "pbm": "ppm", "pgm": "ppm", "pnm": "ppm"}  # formats that have several endings
_CONVERTED = {"bmp": "BMP", "gif": "GIF", "tif": "TIFF", "tiff": "TIFF"}  # to PNG: training does not decode them
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
_IMAGES = tuple(f".{suffix}" for suffix in (*IMAGE_SUFFIXES, *_STORED_AS, *_CONVERTED))
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


@dataclass(frozen=True)
class Item:
    """A sample that is to be written.

    Attributes:
        key: its name in the shard, unique in its split, without dots (a webdataset key ends at the first one).
        label: class number.
        source: its file.
        part: for files of several samples: the row and the number of labels, or first and last time in microseconds.
    """

    key: str
    label: int
    source: Path
    part: tuple[int, ...] = ()


@dataclass(frozen=True)
class Listing:
    """Items of each split, and the names of the classes by number. Raises ValueError for an empty split."""

    splits: dict[str, list[Item]]
    classes: list[str]

    def __post_init__(self) -> None:
        if empty := [split for split, items in self.splits.items() if not items]:
            raise ValueError(f"there are no samples for the split {empty[0]!r}")

    def with_unique_keys(self) -> Listing:
        """The listing with keys that are one to one in each split: `1.jpg` and `1.png` come to the same at first."""
        return replace(self, splits={split: _with_unique_keys(items) for split, items in self.splits.items()})

    def numbered_as(self, classes: Sequence[str]) -> Listing:
        """The listing with the numbers that its classes have in a list. Raises ValueError for one that it lacks."""
        if unknown := [name for name in self.classes if name not in classes]:
            raise ValueError(f"--classes-of: of these classes its list has no {', '.join(map(repr, unknown[:5]))}")
        numbers = [classes.index(name) for name in self.classes]
        splits = {
            split: [replace(item, label=numbers[item.label]) for item in items] for split, items in self.splits.items()
        }
        return Listing(splits, list(classes))


def _with_unique_keys(items: Sequence[Item]) -> list[Item]:
    """Items of which those that have an earlier one's key get a number behind it."""
    taken, given = {item.key for item in items}, Counter[str]()
    found = []
    for item in items:
        given[item.key] += 1
        key = item.key
        while given[item.key] > 1 and key in taken:
            key = f"{item.key}_{given[item.key]}"
            if key in taken:
                given[item.key] += 1
        taken.add(key)
        found.append(replace(item, key=key))
    return found


# --- images


def list_cifar(folder: Path, classes: Literal[10, 100]) -> Listing:
    """Rows of the binary version of CIFAR-10, or of CIFAR-100 with its fine classes.

    A row has one byte for each label (CIFAR-100: coarse, fine) and 3 x 32 x 32 for the pixels. The Python version holds
    pickles and is not read.
    """
    name, names, files, labels = _CIFAR[classes]
    folder = folder / name if (folder / name).is_dir() else folder
    if not (folder / names).is_file():
        raise ValueError(f"{folder} has no {names}: unpack the binary version of CIFAR-{classes} there ({name})")
    class_names = _lines(folder / names)
    splits: dict[str, list[Item]] = {split: [] for split in files}
    for split, paths in files.items():
        for number, path in enumerate(folder / each for each in paths):
            splits[split] += [
                Item(f"{split}_{class_names[label]}_{number}_{row:05d}", label, path, (row, labels))
                for row, label in enumerate(cifar_rows(path, labels)[:, labels - 1].tolist())
            ]
    return Listing(splits, class_names)


@lru_cache(maxsize=1)  # the rows of a file come one after another
def cifar_rows(path: Path, labels: int) -> np.ndarray:
    """Rows of a file of CIFAR, uint8 [n, labels + 3072], mapped into memory."""
    try:
        return np.memmap(path, np.uint8, "r").reshape(-1, labels + _PIXELS)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is missing, cut or none of CIFAR's files ({error})") from error


def list_image_folders(folder: Path) -> Listing:
    """`<split>/<class>/*.jpg` of the splits train, val and test that exist; or `<class>/*.jpg`, all training.

    Files of a class may lie at any depth.
    """
    return _list_classes(split_folders(folder) or {"train": folder}, _IMAGES)


def list_tiny_imagenet(folder: Path) -> Listing:
    """`train/<wnid>/images/*`, and `val/images/*` by the lines of `val/val_annotations.txt`; its test has no labels."""
    classes = class_names(folder / "train")
    train = []
    for label, wnid in enumerate(classes):
        images = folder / "train" / wnid / "images"
        train += [Item(_key(path, wnid, images), label, path) for path in files_of(images, _IMAGES)]
    val = []
    for line in _lines(folder / "val" / "val_annotations.txt"):
        name, wnid = (*line.split("\t"), "")[:2]
        path = folder / "val" / "images" / name
        if wnid not in classes or not path.is_file():
            raise ValueError(f"{folder}/val/val_annotations.txt: {line!r} is no file of val/images and class of train")
        val.append(Item(_key(path, wnid, path.parent), classes.index(wnid), path))
    return Listing({"train": train, "val": val}, classes)


# --- event cameras


def list_event_folders(folder: Path) -> Listing:
    """`<split>/<class>/*`, or `<class>/*`: then the first 90 % of each class, in numeric order of the names, train."""
    if folders := split_folders(folder):
        return _list_classes(folders, RECORDING_SUFFIXES)
    classes = class_names(folder)
    splits: dict[str, list[Item]] = {"train": [], "test": []}
    for name, items in zip(classes, _items(folder, classes, RECORDING_SUFFIXES), strict=True):
        count = round(_TRAIN_SHARE * len(items))
        if not 0 < count < len(items):
            raise ValueError(f"class {name!r} has {len(items)} recordings, too few to split them; make train and test")
        splits["train"] += items[:count]
        splits["test"] += items[count:]
    return Listing(splits, classes)


def list_gestures(folder: Path) -> Listing:
    """DVS128 Gesture: recordings of `trials_to_train.txt` and `trials_to_test.txt`, cut by `<name>_labels.csv`.

    Each line of a label file is a clip: class, first and last time in µs. Class n is number n - 1. Without the lists it
    is a folder of classes.
    """
    if not (folder / _TRIALS.format("train")).is_file():
        return list_event_folders(folder)
    splits = {}
    for split in ("train", "test"):
        recordings = _lines(folder / _TRIALS.format(split))
        splits[split] = [clip for name in recordings for clip in _clips(folder / name)]
    return Listing(splits, list(GESTURES))


def _clips(recording: Path) -> list[Item]:
    labels = recording.with_name(f"{recording.stem}_labels.csv")
    if not recording.is_file():
        raise ValueError(f"{recording} does not exist, and a list of trials names it")
    clips: list[Item] = []
    for line in _lines(labels)[1:]:
        try:
            gesture, start, end = map(int, line.split(",")[:3])
        except ValueError:
            gesture = start = end = 0
        if not 1 <= gesture <= len(GESTURES) or not 0 <= start < end < 1 << 62:
            raise ValueError(f"{labels}: {line!r} is no class from 1 to {len(GESTURES)} with first and last time")
        key = f"{_key(recording, GESTURES[gesture - 1], recording.parent)}_{len(clips):02d}"
        clips.append(Item(key, gesture - 1, recording, (start, end)))
    return clips


# --- files and folders


def _list_classes(folders: Mapping[str, Path], suffixes: Sequence[str]) -> Listing:
    """Listing of splits that are folders of classes; the classes are those of the first split, which all must have."""
    first = next(iter(folders.values()))
    classes = class_names(first)
    splits = {}
    for split, folder in folders.items():
        if more := sorted(set(class_names(folder)) - set(classes)):
            raise ValueError(f"{folder} has folders that {first} does not have: {', '.join(more[:5])}")
        splits[split] = [item for items in _items(folder, classes, suffixes) for item in items]
    return Listing(splits, classes)


def _items(folder: Path, classes: Sequence[str], suffixes: Sequence[str]) -> list[list[Item]]:
    return [
        [Item(_key(path, name, folder / name), label, path) for path in files_of(folder / name, suffixes)]
        for label, name in enumerate(classes)
    ]


def _key(path: Path, class_name: str, folder: Path) -> str:
    """Key of a file: its name below the folder, with the class in front where it does not begin with that."""
    name = "_".join(path.relative_to(folder).with_suffix("").parts)
    if not (class_name + name).isprintable():
        raise ValueError(f"the name of {str(path)!r} is not UTF-8, or has control characters; rename it")
    name, class_name = name.replace(".", "_"), class_name.replace(".", "_")
    return name if name.startswith(f"{class_name}_") else f"{class_name}_{name}"


def _lines(path: Path) -> list[str]:
    try:
        lines = read_file(path).decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as text: {error}") from None
    return [line.strip() for line in lines if line.strip()]


def encode_image(image: Image.Image, kind: str, **options: int) -> bytes:
    """File of an image, in a format of Pillow's."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def encode_cifar(item: Item) -> Mapping[str, bytes]:
    """Writes a row of a file of CIFAR as PNG."""
    row, labels = item.part
    pixels = cifar_rows(item.source, labels)[row, labels:].reshape(3, 32, 32).transpose(1, 2, 0)
    return {"png": encode_image(Image.fromarray(pixels), "PNG", compress_level=1)}


def copy_image(item: Item) -> Mapping[str, bytes]:
    """Takes an image file over as it is, or as PNG where training does not decode its format.

    It is decoded, so that a damaged one is found now. Raises ValueError for it, and for a file of several images.
    """
    suffix = item.source.suffix.lower().removeprefix(".")
    try:
        data = read_file(item.source)
        image = open_image(data, _CONVERTED.get(suffix))
        images = getattr(image, "n_frames", 1) if suffix in _CONVERTED else 1
        if images > 1:
            raise ValueError(f"it holds {images} images; save one of them")
        image.load()
        if suffix not in _CONVERTED:
            return {_STORED_AS.get(suffix, suffix): data}
        image = image if image.mode in _PNG_MODES else image.convert("RGB")
        return {"png": encode_image(image, "PNG", compress_level=1)}
    except MemoryError:
        raise
    except Exception as error:  # Pillow has no common class for what damaged bytes make it raise
        raise ValueError(f"{item.source} cannot be decoded: {error}") from error


@dataclass(frozen=True)
class Reading:
    """Arguments of `read_recording`."""

    sensor_size: tuple[int, int] | None
    sort: bool
    time_unit: TimeUnit | None
    transpose_dvs128: bool


def encode_recording(item: Item, frames: FrameOptions | None, reading: Reading) -> Mapping[str, bytes]:
    """Reads an item's recording, cuts out its clip, if it is one, and makes the files of a sample.

    Without options of `frames` the events are kept.
    """
    recording = _read(item.source, reading)
    if item.part:
        recording = Recording(recording.events.between(*item.part), recording.sensor)
        if not len(recording.events):
            raise ValueError(f"{item.source}: no event in the clip from {item.part[0]} to {item.part[1]} us")
    if frames is None:
        return {EVENTS: encode_events(recording)}
    try:
        return {FRAMES: encode_frames(make_frames(recording, frames))}
    except ValueError as error:
        raise ValueError(f"{item.source}: {error}") from error


@lru_cache(maxsize=1)  # the clips of a recording come one after another
def _read(path: Path, reading: Reading) -> Recording:
    return read_recording(path, reading.sensor_size, reading.sort, reading.time_unit, reading.transpose_dvs128)
