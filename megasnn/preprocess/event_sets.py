"""Data sets of event cameras: where their samples and splits lie, and what is written for a recording."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from megasnn.data.formats import EVENTS, FRAMES, encode_events, encode_frames
from megasnn.events import SUFFIXES, FrameOptions, Recording, make_frames, read_recording
from megasnn.files import SAMPLE_BYTES
from megasnn.preprocess.sources import (
    Item,
    Listing,
    class_names,
    inside,
    items_of_classes,
    key_of,
    list_classes,
    read_lines,
    split_folders,
)

GESTURES = (
    "hand_clapping,right_hand_wave,left_hand_wave,right_arm_clockwise,right_arm_counter_clockwise,left_arm_clockwise,"
    "left_arm_counter_clockwise,arm_roll,air_drums,air_guitar,other_gestures"
).split(",")
_TRIALS = "trials_to_{}.txt"
_TRAIN_SHARE = 0.9  # as the literature splits CIFAR10-DVS


def list_event_folders(folder: Path) -> Listing:
    """`<split>/<class>/*`, or `<class>/*`: then the first 90 % of each class, in numeric order of the names, train.

    Raises:
        ValueError: folders are missing or empty, or a class is too small to be split.
    """
    if folders := split_folders(folder):
        return list_classes(folders, SUFFIXES)
    classes = class_names(folder)
    splits: dict[str, list[Item]] = {"train": [], "test": []}
    for name, items in zip(classes, items_of_classes(folder, classes, SUFFIXES), strict=True):
        count = round(_TRAIN_SHARE * len(items))
        if not 0 < count < len(items):
            raise ValueError(f"class {name!r} has {len(items)} recordings, too few to split them; make train and test")
        splits["train"] += items[:count]
        splits["test"] += items[count:]
    return Listing(splits, classes)


def has_trials(folder: Path) -> bool:
    """Tell whether a folder has the lists of DVS128 Gesture."""
    return (folder / _TRIALS.format("train")).is_file()


def list_gestures(folder: Path) -> Listing:
    """DVS128 Gesture: recordings of `trials_to_train.txt` and `trials_to_test.txt`, cut by `<name>_labels.csv`.

    Each line of a label file is a clip: class, first and last time in µs. Class n is number n - 1.

    Raises:
        ValueError: a file is missing, or a line of a label file makes no sense; names it.
    """
    splits = {}
    for split in ("train", "test"):
        recordings = [inside(folder, name) for name in read_lines(folder / _TRIALS.format(split))]
        splits[split] = [clip for recording in recordings for clip in _clips(recording)]
    return Listing(splits, list(GESTURES))


def _clips(recording: Path) -> list[Item]:
    labels = recording.with_name(f"{recording.stem}_labels.csv")
    if not recording.is_file():
        raise ValueError(f"{recording} does not exist, and a list of trials names it")
    clips: list[Item] = []
    for line in read_lines(labels)[1:]:
        try:
            gesture, start, end = map(int, line.split(",")[:3])
        except ValueError:
            raise ValueError(f"{labels}: {line!r} is not class, first and last time") from None
        if not 1 <= gesture <= len(GESTURES) or not 0 <= start < end < 1 << 62:
            raise ValueError(f"{labels}: {line!r} is no class from 1 to {len(GESTURES)} with first and last time")
        key = f"{key_of(recording, GESTURES[gesture - 1])}_{len(clips):02d}"
        clips.append(Item(key, gesture - 1, recording, (start, end)))
    return clips


@dataclass(frozen=True)
class EncodeRecording:
    """Reads an item's recording, cuts out its clip where it is one, and makes the files of a sample.

    Attributes:
        frames: how they are made; None keeps the events.
        sensor: height and width where a file does not say them.
        sort: puts events in order of time.
        limit: bytes that a recording or its frames may take.
    """

    frames: FrameOptions | None
    sensor: tuple[int, int] | None = None
    sort: bool = False
    limit: int = SAMPLE_BYTES

    def __call__(self, item: Item) -> Mapping[str, bytes]:
        recording = _read(item.source, self.sensor, self.sort, self.limit)
        if item.part:
            events = recording.events.between(*item.part)
            if not len(events):
                raise ValueError(f"{item.source}: no event in the clip from {item.part[0]} to {item.part[1]} us")
            recording = Recording(events, recording.sensor)
        if self.frames is None:
            return {EVENTS: encode_events(recording)}
        try:
            return {FRAMES: encode_frames(make_frames(recording, self.frames, self.limit))}
        except ValueError as error:
            raise ValueError(f"{item.source}: {error}") from error


@lru_cache(maxsize=1)  # the clips of a recording come one after another
def _read(path: Path, sensor: tuple[int, int] | None, sort: bool, limit: int) -> Recording:
    return read_recording(path, sensor_size=sensor, sort=sort, limit=limit)
