"""Command line of megasnn-preprocess-data: a subcommand with flags for each data set."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import tyro

from megasnn.common.files import SAMPLE_LIMIT, SAMPLE_MB, quantity
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
from megasnn.data.preprocess.spiking_audio import UNITS, HeldOut, SpikeFrames, encode_spikes, list_shd, list_ssc
from megasnn.data.preprocess.text import Text
from megasnn.data.preprocess.writing import Encode, preprocess
from megasnn.data.shards import INDEX_NAME, Index, read_index

_VALID_SHARE = 0.2  # of SHD, as in arXiv 2408.07517


@dataclass(frozen=True, kw_only=True)
class ShardOptions(ABC):
    """Flags for all data sets."""

    input: Path
    """Folder of the data set."""
    output: Path
    """Folder for the shards and their index.json; must not exist, or be empty."""
    samples_per_shard: int = 500
    """Samples per shard; the last shard of a split may have fewer."""
    skip_broken: bool = False
    """Leave out and count broken samples, instead of stopping at the first."""
    max_sample_mb: int = SAMPLE_MB
    """Largest size in megabytes of a recording or image: its file, decoded, and as frames."""
    classes_of: Path | None = None
    """Folder of shards with the class numbers to use; by default the order of class names."""
    workers: int = os.cpu_count() or 1
    """Number of processes; does not change the shards."""

    def __post_init__(self) -> None:
        for name in ("samples_per_shard", "max_sample_mb", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")

    @abstractmethod
    def listing(self, folder: Path) -> Listing:
        """Finds the samples. Raises ValueError naming a missing file or folder."""

    @abstractmethod
    def encode(self) -> Encode:
        """Function that turns an item into a sample's files."""

    def run(self) -> str:
        """Writes the shards; returns a summary. Raises ValueError as `preprocess`."""
        if not self.input.is_dir():
            raise ValueError(f"--input {self.input} is no folder; give the folder of the data set")
        os.environ[SAMPLE_LIMIT] = str(self.max_sample_mb)  # worker processes inherit it
        listing = self.listing(self.input).with_unique_keys()
        if self.classes_of is not None:
            listing = listing.numbered_as(self._other_classes(self.classes_of))
        index = preprocess(listing, self.encode(), self.output, self.samples_per_shard, self.workers, self.skip_broken)
        return "\n".join(self._summary(listing, index))

    def _summary(self, listing: Listing, index: Index) -> list[str]:
        lines = []
        for split in listing.splits:
            shards = index.of_split(split)
            samples = sum(len(shard.members.keys) for shard in shards)
            megabytes = sum(shard.size for shard in shards) / 1e6
            found = f"{quantity(samples, 'sample')}, {megabytes:.1f} MB"
            lines.append(f"{found}: {len(shards)} x {self.output / split}-*.tar")
        broken: list[str] = []
        for shard in index.shards:
            broken += shard.broken
        if broken:
            number = quantity(len(broken), "broken sample")
            lines.append(f"left out: {number} ({INDEX_NAME} lists all), such as {broken[0]}")
        used = set[Path]()
        for items in listing.splits.values():
            used.update(item.source for item in items)
        left_out = describe_left_out(self.input, used)
        if left_out:
            lines.append(left_out)
        return lines

    @staticmethod
    def _other_classes(folder: Path) -> list[str]:
        index = read_index(folder)
        if index is None or not index.classes:
            raise ValueError(f"--classes-of {folder} has no {INDEX_NAME} with classes; give a folder of shards")
        return index.classes


@dataclass(frozen=True, kw_only=True)
class EventFolder(ShardOptions):
    """Recordings of any format in train/CLASS and test/CLASS, or in CLASS: then 90 % of each class train."""

    sensor_size: tuple[int, int] | None = None
    """Height and width of the sensor, for recordings without them; by default the data set's."""
    sort_events: bool = False
    """Sort events by time, instead of refusing recordings with late events, which some cameras send."""
    time_unit: TimeUnit | None = None
    """Unit of times in .npz and .npy files; by default whole microseconds."""
    keep_events: bool = False
    """Store events instead of frames; training makes the frames by its own flags. Larger, and slower to read."""
    frames: tyro.conf.OmitArgPrefixes[FrameOptions] = FrameOptions()
    listing = staticmethod(list_event_folders)
    default_sensor: ClassVar[tuple[int, int] | None] = None
    transpose_dvs128: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sensor_size is not None and min(self.sensor_size) < 1:
            raise ValueError(f"--sensor-size must be at least 1 1, got {self.sensor_size[0]} {self.sensor_size[1]}")
        if self.keep_events and self.frames != FrameOptions():
            raise ValueError(
                "--keep-events makes no frames: remove --time-steps, --split-by and --size; training has flags of the "
                "same meaning (--image-size for the size)"
            )

    def encode(self) -> Encode:
        sensor = self.sensor_size or self.default_sensor
        reading = Reading(sensor, self.sort_events, self.time_unit, self.transpose_dvs128)
        frames = None if self.keep_events else self.frames
        return partial(encode_recording, frames=frames, reading=reading)


@dataclass(frozen=True, kw_only=True)
class Cifar10Dvs(EventFolder):
    """CIFAR10-DVS: a folder of .aedat recordings, or SpikingJelly's .npz, for each class; SpikingJelly's x and y."""

    default_sensor = (128, 128)
    transpose_dvs128 = True


@dataclass(frozen=True, kw_only=True)
class NMnist(EventFolder):
    """N-MNIST: Train/DIGIT/*.bin and Test/DIGIT/*.bin, or SpikingJelly's .npz."""

    default_sensor = (34, 34)


@dataclass(frozen=True, kw_only=True)
class Dvs128Gesture(EventFolder):
    """DVS128 Gesture: recordings, labels, trials_to_train.txt and trials_to_test.txt; or SpikingJelly's .npz."""

    listing = staticmethod(list_gestures)
    default_sensor = (128, 128)


@dataclass(frozen=True, kw_only=True)
class ImageFolder(ShardOptions):
    """Images in a folder for each class, or below train, val and test, as in ImageNet."""

    listing = staticmethod(list_image_folders)

    def encode(self) -> Encode:
        return copy_image


@dataclass(frozen=True, kw_only=True)
class TinyImagenet(ImageFolder):
    """Tiny-ImageNet, unpacked: train/WNID/images, and val with val_annotations.txt."""

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


@dataclass(frozen=True, kw_only=True)
class SpikingAudio(ShardOptions):
    """Frames of spiking audio: counts [T, channels] of the spikes in equal parts of the duration."""

    time_steps: int = 100
    """Frames per sample, T. Published are 100 and 250, of 14 and 5.6 ms."""
    duration: float = 1.4
    """Seconds that the frames cover together; a later spike is refused."""
    channels: int = UNITS
    """Input channels; 140 adds up five neighbouring units in each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._frames()

    def _frames(self) -> SpikeFrames:
        return SpikeFrames(self.time_steps, self.duration, self.channels)

    def encode(self) -> Encode:
        return partial(encode_spikes, frames=self._frames())


@dataclass(frozen=True, kw_only=True)
class Shd(SpikingAudio):
    """Spiking Heidelberg Digits: shd_train.h5 and shd_test.h5; a part of the first becomes val."""

    valid_share: float | None = None
    """Part of each class of shd_train.h5 that becomes val, 0 for none; by default 0.2, the published share."""
    valid_speakers: tuple[int, ...] = ()
    """Speakers of shd_train.h5 whose samples become val, in place of a share; two of the test's are in no training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.valid_share is not None and not 0 <= self.valid_share < 1:
            raise ValueError(f"--valid-share must be at least 0 and below 1, got {self.valid_share}")
        if self.valid_share is not None and self.valid_speakers:
            raise ValueError("--valid-share and --valid-speakers both choose the validation samples; leave one out")

    def listing(self, folder: Path) -> Listing:
        if self.valid_speakers:
            return list_shd(folder, HeldOut(speakers=self.valid_speakers))
        return list_shd(folder, HeldOut(share=_VALID_SHARE if self.valid_share is None else self.valid_share))


@dataclass(frozen=True, kw_only=True)
class Ssc(SpikingAudio):
    """Spiking Speech Commands: ssc_train.h5, ssc_valid.h5 and ssc_test.h5."""

    listing = staticmethod(list_ssc)


Command = (
    Cifar10Dvs
    | NMnist
    | Dvs128Gesture
    | EventFolder
    | Cifar10
    | Cifar100
    | TinyImagenet
    | ImageFolder
    | Shd
    | Ssc
    | Text
)
