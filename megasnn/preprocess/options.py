"""Command line of megasnn-preprocess-data: a subcommand for each data set, with the flags that it has."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from megasnn.data.index import INDEX_NAME
from megasnn.events import FrameOptions
from megasnn.files import SAMPLE_MB
from megasnn.preprocess.encoding import CopyImage, EncodeRecording, encode_cifar
from megasnn.preprocess.sources import (
    Listing,
    list_cifar,
    list_event_folders,
    list_gestures,
    list_image_folders,
    list_tiny_imagenet,
)
from megasnn.preprocess.writing import Encode, Job, preprocess


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
    workers: int = os.cpu_count() or 1
    """Processes; the shards do not depend on their number."""

    def __post_init__(self) -> None:
        for name in ("samples_per_shard", "max_sample_mb", "workers", "size"):
            value = getattr(self, name, None)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")

    @abstractmethod
    def listing(self) -> Listing:
        """Finds the samples. Raises ValueError, naming a missing file or folder."""

    @abstractmethod
    def encode(self) -> Encode:
        """Function that makes a sample's files."""

    def run(self) -> str:
        """Makes the shards; returns a summary. Raises ValueError as `preprocess`."""
        if not self.input.is_dir():
            raise ValueError(f"--input {self.input} is no folder; the data set is expected there")
        options = {name: value for name, value in asdict(self).items() if name not in ("input", "output", "workers")}
        job = Job(self.listing(), self.encode(), self.samples_per_shard, self.skip_broken, options)
        index = preprocess(job, self.output, self.workers)
        lines = []
        for split in job.listing.splits:
            shards = index.of_split(split)
            braces = f"{{00000..{len(shards) - 1:05d}}}" if len(shards) > 1 else "00000"
            samples, size = sum(len(shard.members.keys) for shard in shards), sum(shard.size for shard in shards)
            lines.append(f"{samples} samples, {size / 1e6:.1f} MB in {self.output / split}-{braces}.tar")
        if broken := [reason for shard in index.shards for reason in shard.broken]:
            lines.append(f"{len(broken)} samples cannot be used and were left out ({INDEX_NAME} has all): {broken[0]}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class EventFolder(ShardOptions):
    """Recordings of any format: train/CLASS/FILE and test/CLASS/FILE, or CLASS/FILE, then 90 % of each class train."""

    sensor_size: tuple[int, int] | None = None
    """Height and width of the sensor, where recordings do not say them; by default the data set's."""
    sort_events: bool = False
    """Put events in order of time, instead of refusing recordings that are not: some cameras send a few late."""
    keep_events: bool = False
    """Keep the events rather than frames: training then makes them by its own flags. Larger, and slower to read."""
    time_steps: int = 10
    """Frames of a sample, T."""
    size: int | None = None
    """Height and width to scale frames to (48 is usual for CIFAR10-DVS); by default the sensor's."""
    split_by: Literal["number", "time"] = "number"
    """Equal shares of a recording's events (number) or of its time for all frames."""
    frame_duration: int | None = None
    """Microseconds of a frame, instead of equal shares: later events are left out, missing frames are empty."""
    normalize_frames: Literal["none", "frame-max"] = "none"
    """frame-max divides each frame by its largest count, before scaling; none leaves counts."""
    default_sensor: ClassVar[tuple[int, int] | None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sensor_size is not None and min(self.sensor_size) < 1:
            raise ValueError(f"--sensor-size must be at least 1 1, got {self.sensor_size[0]} {self.sensor_size[1]}")
        frames = self.frames()
        if self.keep_events and frames != FrameOptions():
            raise ValueError(f"--keep-events makes no frames: give {frames} to training instead")

    def frames(self) -> FrameOptions:
        """Options of frames. Raises ValueError for flags that contradict."""
        return FrameOptions(self.time_steps, self.split_by, self.frame_duration, self.size, self.normalize_frames)

    def listing(self) -> Listing:
        return list_event_folders(self.input)

    def encode(self) -> Encode:
        frames, sensor = None if self.keep_events else self.frames(), self.sensor_size or self.default_sensor
        return EncodeRecording(frames, sensor, self.sort_events, self.max_sample_mb << 20)


@dataclass(frozen=True, kw_only=True)
class Cifar10Dvs(EventFolder):
    """CIFAR10-DVS: a folder of .aedat recordings for each class, or of SpikingJelly's .npz."""

    default_sensor = (128, 128)


@dataclass(frozen=True, kw_only=True)
class NMnist(EventFolder):
    """N-MNIST: Train/DIGIT/*.bin and Test/DIGIT/*.bin, or the same of SpikingJelly's .npz."""

    default_sensor = (34, 34)


@dataclass(frozen=True, kw_only=True)
class Dvs128Gesture(EventFolder):
    """DVS128 Gesture: recordings with trials_to_train.txt, trials_to_test.txt and labels; or SpikingJelly's .npz."""

    default_sensor = (128, 128)

    def listing(self) -> Listing:
        return list_gestures(self.input)


@dataclass(frozen=True, kw_only=True)
class ImageFolder(ShardOptions):
    """Images in a folder for each class, perhaps below train, val and test, as ImageNet has them."""

    size: int | None = None
    """Pixels that the shorter side is scaled down to; by default files are taken over as they are."""

    def listing(self) -> Listing:
        return list_image_folders(self.input)

    def encode(self) -> Encode:
        return CopyImage(self.size, self.max_sample_mb << 20)


@dataclass(frozen=True, kw_only=True)
class TinyImageNet(ImageFolder):
    """Tiny-ImageNet as it unpacks: train/WNID/images, and val with val_annotations.txt."""

    def listing(self) -> Listing:
        return list_tiny_imagenet(self.input)


@dataclass(frozen=True, kw_only=True)
class Cifar10(ShardOptions):
    """CIFAR-10, binary version (cifar-10-batches-bin)."""

    classes: ClassVar[Literal[10, 100]] = 10

    def listing(self) -> Listing:
        return list_cifar(self.input, self.classes)

    def encode(self) -> Encode:
        return encode_cifar


@dataclass(frozen=True, kw_only=True)
class Cifar100(Cifar10):
    """CIFAR-100, binary version (cifar-100-binary), with its 100 fine classes."""

    classes = 100


Command = (
    Annotated[Cifar10Dvs, tyro.conf.subcommand("cifar10-dvs")]
    | Annotated[NMnist, tyro.conf.subcommand("n-mnist")]
    | Annotated[Dvs128Gesture, tyro.conf.subcommand("dvs128-gesture")]
    | Annotated[EventFolder, tyro.conf.subcommand("event-folder")]
    | Annotated[Cifar10, tyro.conf.subcommand("cifar10")]
    | Annotated[Cifar100, tyro.conf.subcommand("cifar100")]
    | Annotated[TinyImageNet, tyro.conf.subcommand("tiny-imagenet")]
    | Annotated[ImageFolder, tyro.conf.subcommand("image-folder")]
)
