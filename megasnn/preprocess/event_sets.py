"""CIFAR10-DVS, N-MNIST and DVS128 Gesture as they are downloaded: their samples, classes and usual splits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from megasnn.data.event_files import EVENTS, FRAMES, FrameSettings, encode_events, encode_frames, make_frames
from megasnn.events import SUFFIXES, Recording, read_recording
from megasnn.files.sample_size import SAMPLE_BYTES
from megasnn.preprocess.folders import (
    class_names,
    file_inside,
    files_of_classes,
    items_of_classes,
    items_of_list,
    read_lines,
    require_folder,
    splits_of_classes,
)
from megasnn.preprocess.items import Item, Listing, as_key, as_text

GESTURES = (
    "hand_clapping,right_hand_wave,left_hand_wave,right_arm_clockwise,right_arm_counter_clockwise,left_arm_clockwise,"
    "left_arm_counter_clockwise,arm_roll,air_drums,air_guitar,other_gestures"
).split(",")
_FIVE_BYTES = (".bin", ".bs2")  # such files do not say what their sensor is


@dataclass(frozen=True)
class EncodeRecording:
    """Reads an item's recording, cuts out its clip where it is one, and makes the files of a sample.

    Attributes:
        settings: of the frames; None keeps the events.
        sensor: height and width where a file does not say them.
        sort: puts events in order of time.
        limit: bytes that a recording or its frames may take.
    """

    settings: FrameSettings | None
    sensor: tuple[int, int] | None = None
    sort: bool = False
    limit: int = SAMPLE_BYTES

    def __call__(self, item: Item) -> Mapping[str, bytes]:
        sensor = self.sensor if item.source.suffix.lower() in _FIVE_BYTES else None
        recording = _read(item.source, sensor, self.sort, self.limit)
        if item.part:
            recording = _clip(recording, item)
        if self.settings is None:
            return {EVENTS: encode_events(recording)}
        try:
            return {FRAMES: encode_frames(make_frames(recording, self.settings, self.limit))}
        except ValueError as error:
            raise ValueError(f"{item.source}: {error}") from error


@lru_cache(maxsize=1)  # the clips of a recording come one after another
def _read(path: Path, sensor: tuple[int, int] | None, sort: bool, limit: int) -> Recording:
    return read_recording(path, sensor_size=sensor, sort=sort, limit=limit)


def _clip(recording: Recording, item: Item) -> Recording:
    start, end = item.part
    events = recording.events.between(start, end)
    if not len(events):
        raise ValueError(f"{item.source}: no event between {start} and {end} us, where its labels have a gesture")
    return Recording(events, recording.sensor)


def find_cifar10_dvs(folder: Path, class_list: Path | None, train_share: float) -> Listing:
    """`<class>/<anything>_<number>.aedat`: the first recordings of each class, in numeric order, train.

    Raises:
        ValueError: folders are missing or empty, or a class too small to be split.
    """
    require_folder(folder, "a folder of recordings for each class")
    classes = class_names(folder, class_list)
    files = files_of_classes(folder, classes, SUFFIXES)
    first = [round(train_share * len(paths)) for paths in files]
    for name, paths, count in zip(classes, files, first, strict=True):
        if not 0 < count < len(paths):
            raise ValueError(
                f"class {name!r} has {len(paths)} recordings: --train-share {train_share} leaves a split empty"
            )
    train = items_of_classes([paths[:count] for paths, count in zip(files, first, strict=True)])
    test = items_of_classes([paths[count:] for paths, count in zip(files, first, strict=True)])
    return Listing({"train": train, "test": test}, [as_text(name) for name in classes])


def find_n_mnist(folder: Path) -> Listing:
    """`Train/<digit>/*.bin` and `Test/<digit>/*.bin`.

    Raises:
        ValueError: folders are missing or empty.
    """
    require_folder(folder, "the folders Train and Test of N-MNIST")
    for split in ("Train", "Test"):
        if not (folder / split).is_dir():
            raise ValueError(f"{folder} has no folder {split}; a flat folder is read with --train-list and --test-list")
    return Listing(*splits_of_classes({"train": folder / "Train", "test": folder / "Test"}, None, SUFFIXES))


def find_listed(folder: Path, train_list: Path | None, test_list: Path | None) -> Listing:
    """Recordings in one folder, with a text file "name class" for each split.

    Raises:
        ValueError: the training list is not given, or a list cannot be used.
    """
    require_folder(folder, "a flat folder of recordings")
    if train_list is None:
        raise ValueError("--test-list needs --train-list too")
    lists = {"train": train_list, **({"test": test_list} if test_list is not None else {})}
    splits = {split: items_of_list(path, folder, SUFFIXES) for split, path in lists.items()}
    largest = max((item.label for items in splits.values() for item in items), default=-1)
    return Listing(splits, [str(label) for label in range(largest + 1)])


def find_dvs128_gesture(folder: Path) -> Listing:
    """Recordings listed in `trials_to_train.txt` and `trials_to_test.txt`, cut into clips by `<name>_labels.csv`.

    Class n of the label files is number n - 1. Each line of theirs is a clip: class, first and last time in µs.

    Raises:
        ValueError: a file is missing, or a line of a label file makes no sense; names it.
    """
    require_folder(folder, "DVS128 Gesture's recordings with trials_to_train.txt")
    if (folder / "DvsGesture").is_dir():
        folder = folder / "DvsGesture"
    splits = {}
    for split in ("train", "test"):
        trials = folder / f"trials_to_{split}.txt"
        if not trials.is_file():
            raise ValueError(f"{trials} does not exist; it lists the recordings of the split {split!r}")
        names = [line.strip() for line in read_lines(trials) if line.strip()]
        splits[split] = [clip for name in names for clip in _clips(file_inside(folder, name, trials), trials)]
    return Listing(splits, list(GESTURES))


def _clips(recording: Path, trials: Path) -> list[Item]:
    labels = recording.with_name(f"{recording.stem}_labels.csv")
    for path in (recording, labels):
        if not path.is_file():
            raise ValueError(f"{path} does not exist, and {trials} names it")
    clips: list[Item] = []
    for number, line in enumerate(read_lines(labels), 1):
        fields = line.split(",")
        if number == 1 or not line:
            continue  # the names of the columns
        try:
            gesture, start, end = (int(field) for field in fields[:3])
        except ValueError:
            raise ValueError(f"{labels}, line {number}: {fields} is not class, first and last time") from None
        if not 1 <= gesture <= len(GESTURES) or not 0 <= start < end < 1 << 62:
            raise ValueError(f"{labels}, line {number}: no class 1..{len(GESTURES)} from {start} to {end} us: {fields}")
        key = as_key(f"{recording.stem}_{len(clips):02d}_{GESTURES[gesture - 1]}")
        clips.append(Item(key, gesture - 1, recording, (start, end)))
    return clips
