"""Command line of megasnn-preprocess-data: a subcommand for each data set, with the flags that it has."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import tyro

from megasnn.common.files import SAMPLE_LIMIT, SAMPLE_MB
from megasnn.data.events import FrameOptions, TimeUnit
from megasnn.data.preprocess.folders import describe_left_out
from megasnn.data.preprocess.sources import (
    Listing,
    Reading,
    copy_image,
    encode_cifar,
    encode_recording,
    list_cifar,
    list_event_folders,
    list_gestures,
    list_image_folders,
    list_tiny_imagenet,
)
from megasnn.data.preprocess.writing import Encode, preprocess
from megasnn.data.shards import INDEX_NAME, read_index


@dataclass(frozen=True, kw_only=True)
class ShardOptions(ABC):
    """Flags of all data sets."""

    input: Path
    """Folder of the data set."""
    output: Path
    """Folder for the shards and their index.json; must not exist."""
    samples_per_shard: int = 500
    """Samples of a shard; the last one of a split has the rest."""
    skip_broken: bool = False
    """Leave out and count samples that cannot be used, instead of stopping at the first one."""
    max_sample_mb: int = SAMPLE_MB
    """A recording or image that takes more megabytes, in its file, decoded, or as frames, cannot be used."""
    classes_of: Path | None = None
    """A folder of shards whose list of classes numbers these, too; by default the order of their names does."""
    workers: int = os.cpu_count() or 1
    """Processes; the shards do not depend on their number."""

    def __post_init__(self) -> None:
        for name in ("samples_per_shard", "max_sample_mb", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")

    @staticmethod
    @abstractmethod
    def listing(folder: Path) -> Listing:
        """Finds the samples. Raises ValueError, naming a missing file or folder."""

    @abstractmethod
    def encode(self) -> Encode:
        """Function that makes a sample's files."""

    def run(self) -> str:
        """Makes the shards; returns a summary. Raises ValueError as `preprocess`."""
        if not self.input.is_dir():
            raise ValueError(f"--input {self.input} is no folder; the data set is expected there")
        os.environ[SAMPLE_LIMIT] = str(self.max_sample_mb)
        listing, encode = self.listing(self.input).with_unique_keys(), self.encode()
        if self.classes_of is not None:
            listing = listing.numbered_as(self._other_classes(self.classes_of))
        index = preprocess(listing, encode, self.output, self.samples_per_shard, self.workers, self.skip_broken)
        lines = []
        for split in listing.splits:
            shards = index.of_split(split)
            samples, size = sum(len(shard.members.keys) for shard in shards), sum(shard.size for shard in shards)
            lines.append(f"{samples} samples, {size / 1e6:.1f} MB: {len(shards)} x {self.output / split}-*.tar")
        if broken := [reason for shard in index.shards for reason in shard.broken]:
            lines.append(f"{len(broken)} samples cannot be used and were left out ({INDEX_NAME} has all): {broken[0]}")
        used = {item.source for items in listing.splits.values() for item in items}
        if left_out := describe_left_out(self.input, used):
            lines.append(left_out)
        return "\n".join(lines)

    @staticmethod
    def _other_classes(folder: Path) -> list[str]:
        index = read_index(folder)
        if index is None or not index.classes:
            raise ValueError(f"--classes-of {folder} has no {INDEX_NAME} with classes; give a folder of shards")
        return index.classes


@dataclass(frozen=True, kw_only=True)
class EventFolder(ShardOptions):
    """Recordings of any format: train/CLASS/FILE and test/CLASS/FILE, or CLASS/FILE, then 90 % of each class train."""

    sensor_size: tuple[int, int] | None = None
    """Height and width of the sensor, where recordings do not say them; by default the data set's."""
    sort_events: bool = False
    """Put events in order of time, instead of refusing recordings that are not: some cameras send a few late."""
    time_unit: TimeUnit | None = None
    """Unit of the times in .npz and .npy files; by default they are whole numbers of microseconds."""
    keep_events: bool = False
    """Keep the events rather than frames: training then makes them by its own flags. Larger, and slower to read."""
    frames: tyro.conf.OmitArgPrefixes[FrameOptions] = FrameOptions()
    listing = staticmethod(list_event_folders)
    default_sensor: ClassVar[tuple[int, int] | None] = None
    transpose_dvs128: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sensor_size is not None and min(self.sensor_size) < 1:
            raise ValueError(f"--sensor-size must be at least 1 1, got {self.sensor_size[0]} {self.sensor_size[1]}")
        if self.keep_events and self.frames != FrameOptions():
            raise ValueError(f"--keep-events makes no frames: give {self.frames} to training instead")

    def encode(self) -> Encode:
        sensor = self.sensor_size or self.default_sensor
        reading = Reading(sensor, self.sort_events, self.time_unit, self.transpose_dvs128)
        return partial(encode_recording, frames=None if self.keep_events else self.frames, reading=reading)


@dataclass(frozen=True, kw_only=True)
class Cifar10Dvs(EventFolder):
    """CIFAR10-DVS: a folder of .aedat recordings for each class, or of SpikingJelly's .npz; with its x and y."""

    default_sensor = (128, 128)
    transpose_dvs128 = True


@dataclass(frozen=True, kw_only=True)
class NMnist(EventFolder):
    """N-MNIST: Train/DIGIT/*.bin and Test/DIGIT/*.bin, or the same of SpikingJelly's .npz."""

    default_sensor = (34, 34)


@dataclass(frozen=True, kw_only=True)
class Dvs128Gesture(EventFolder):
    """DVS128 Gesture: recordings with trials_to_train.txt, trials_to_test.txt and labels; or SpikingJelly's .npz."""

    listing = staticmethod(list_gestures)
    default_sensor = (128, 128)


@dataclass(frozen=True, kw_only=True)
class ImageFolder(ShardOptions):
    """Images in a folder for each class, perhaps below train, val and test, as ImageNet has them."""

    listing = staticmethod(list_image_folders)

    def encode(self) -> Encode:
        return copy_image


@dataclass(frozen=True, kw_only=True)
class TinyImagenet(ImageFolder):
    """Tiny-ImageNet as it unpacks: train/WNID/images, and val with val_annotations.txt."""

    listing = staticmethod(list_tiny_imagenet)


@dataclass(frozen=True, kw_only=True)
class Cifar10(ShardOptions):
    """CIFAR-10, binary version (cifar-10-batches-bin)."""

    listing = staticmethod(partial(list_cifar, classes=10))

    def encode(self) -> Encode:
        return encode_cifar


@dataclass(frozen=True, kw_only=True)
class Cifar100(Cifar10):
    """CIFAR-100, binary version (cifar-100-binary), with its 100 fine classes."""

    listing = staticmethod(partial(list_cifar, classes=100))


Command = Cifar10Dvs | NMnist | Dvs128Gesture | EventFolder | Cifar10 | Cifar100 | TinyImagenet | ImageFolder
