"""The options of megasnn-preprocess-data: a subcommand for each data set, with those that it has."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from megasnn.data.event_files import FrameSettings
from megasnn.files.sample_size import SAMPLE_MB
from megasnn.preprocess.event_sets import (
    EncodeRecording,
    find_cifar10_dvs,
    find_dvs128_gesture,
    find_listed,
    find_n_mnist,
)
from megasnn.preprocess.image_sets import (
    CopyImage,
    EncodeCifar10,
    encode_digit,
    find_cifar10,
    find_digits,
    find_image_folder,
)
from megasnn.preprocess.items import Listing
from megasnn.preprocess.pool import Encode
from megasnn.preprocess.run import Job


@dataclass(frozen=True, kw_only=True)
class ShardOptions(ABC):
    """What all data sets share."""

    output: Path
    """Folder for the shards and their index.json; new, or the one of an interrupted run, which then continues."""
    samples_per_shard: int = 500
    """Samples of a shard; the last one of a split has the rest."""
    seed: int = 1234
    """Seed of the order of the samples in the shards."""
    shuffle: bool = True
    """--no-shuffle keeps the order of classes and file names."""
    skip_broken: bool = False
    """Leave out and count samples that cannot be used, instead of stopping at the first one."""
    max_sample_mb: int = SAMPLE_MB
    """A recording or image that takes more megabytes, in its file, decoded, or as frames, cannot be used."""
    workers: int = os.cpu_count() or 1
    """Processes; the shards do not depend on their number."""

    @abstractmethod
    def listing(self) -> Listing:
        """Finds the samples. Raises ValueError for what is missing."""

    @abstractmethod
    def encode(self) -> Encode:
        """What makes a sample's files."""

    def contents(self) -> dict[str, Any]:
        """The options that a sample's files depend on, as JSON values."""
        return {}

    def check(self) -> None:
        """Raises ValueError for values that make no sense."""
        for name in ("samples_per_shard", "max_sample_mb", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")

    @property
    def limit(self) -> int:
        """Bytes that a sample may take."""
        return self.max_sample_mb << 20

    def job(self) -> Job:
        """What is to be done. Raises ValueError before anything is written."""
        self.check()
        return Job(
            output=self.output,
            listing=self.listing(),
            encode=self.encode(),
            options={"dataset": type(self).__name__, **self.contents()},
            samples_per_shard=self.samples_per_shard,
            seed=self.seed if self.shuffle else None,
            skip_broken=self.skip_broken,
        )


@dataclass(frozen=True, kw_only=True)
class EventOptions(ShardOptions):
    """What all data sets of event cameras share."""

    sensor: ClassVar[tuple[int, int] | None] = None  # height and width where recordings do not say them
    input: Path
    """Folder of the recordings."""
    time_steps: int | None = None
    """Frames of a sample, T; 10 by default."""
    size: int | None = None
    """Height and width to scale frames to (48 is usual for CIFAR10-DVS); by default the sensor's."""
    split_by: Literal["number", "time"] | None = None
    """Whether frames have equal shares of a recording's events (number, the default) or of its time."""
    frame_duration: int | None = None
    """Microseconds of a frame, instead of equal shares: what comes after T frames is left out, what is missing is
    empty."""
    normalize_frames: Literal["none", "frame-max"] | None = None
    """frame-max divides each frame by its largest count; by default counts stay."""
    sort_events: bool = False
    """Put events in order of time, instead of refusing recordings that are not: some cameras send a few late."""
    keep_events: bool = False
    """Keep the events rather than frames: training then chooses frames by its own flags. Larger, and slower to read."""

    def check(self) -> None:
        super().check()
        frame_flags = ("time_steps", "size", "split_by", "frame_duration", "normalize_frames")
        given = [
            f"--{name.replace('_', '-')} {value}" for name in frame_flags if (value := getattr(self, name)) is not None
        ]
        if self.keep_events and given:
            raise ValueError(f"--keep-events makes no frames: leave out {', '.join(given)}, and give it to training")
        if self.split_by is not None and self.frame_duration is not None:
            raise ValueError(
                f"--split-by {self.split_by} and --frame-duration {self.frame_duration} exclude each other"
            )
        self.settings()

    def settings(self) -> FrameSettings | None:
        """Of the frames; None where events are kept. Raises ValueError for values below 1."""
        if self.keep_events:
            return None
        return FrameSettings(
            time_steps=10 if self.time_steps is None else self.time_steps,
            split_by=self.split_by or "number",
            frame_duration=self.frame_duration,
            size=self.size,
            normalize=self.normalize_frames or "none",
        )

    def encode(self) -> Encode:
        return EncodeRecording(self.settings(), self.sensor, self.sort_events, self.limit)

    def contents(self) -> dict[str, Any]:
        settings = self.settings()
        contents = {"keep_events": True} if settings is None else asdict(settings)
        return {**contents, "sort_events": self.sort_events}


@dataclass(frozen=True, kw_only=True)
class Cifar10Dvs(EventOptions):
    """CIFAR10-DVS: a folder of .aedat recordings for each class."""

    train_share: float = 0.9
    """Share of each class that trains, the first ones in numeric order of the file names; the rest tests."""
    class_list: Path | None = None
    """File with the names of the class folders in the order of their numbers; by default they are sorted."""

    def listing(self) -> Listing:
        return find_cifar10_dvs(self.input, self.class_list, self.train_share)


@dataclass(frozen=True, kw_only=True)
class NMnist(EventOptions):
    """N-MNIST: Train/<digit>/*.bin and Test/<digit>/*.bin, or a flat folder with lists."""

    sensor = (34, 34)
    train_list: Path | None = None
    """For a flat folder: text file with a line "name class" for each training sample."""
    test_list: Path | None = None
    """The same for the test samples."""

    def listing(self) -> Listing:
        if self.train_list is None and self.test_list is None:
            return self.listing_of_folders()
        return find_listed(self.input, self.train_list, self.test_list)

    def listing_of_folders(self) -> Listing:
        """Finds the samples where no lists are given."""
        return find_n_mnist(self.input)


@dataclass(frozen=True, kw_only=True)
class Dvs128Gesture(NMnist):
    """DVS128 Gesture: recordings with trials_to_train.txt, trials_to_test.txt and label files, cut into clips; or a
    flat folder of clips with lists."""

    sensor = (128, 128)

    def listing_of_folders(self) -> Listing:
        return find_dvs128_gesture(self.input)


@dataclass(frozen=True, kw_only=True)
class Cifar10(ShardOptions):
    """CIFAR-10: the Python version (cifar-10-batches-py), or train and test with a folder of images for each class."""

    input: Path
    """Folder of the data set."""

    def listing(self) -> Listing:
        return find_cifar10(self.input)

    def encode(self) -> Encode:
        return EncodeCifar10(self.limit)


@dataclass(frozen=True, kw_only=True)
class ImageFolder(ShardOptions):
    """Images in a folder for each class, perhaps below train, val and test, as ImageNet has them."""

    input: Path
    """Folder of the data set."""
    class_list: Path | None = None
    """File with the names of the class folders in the order of their numbers; by default they are sorted."""
    size: int | None = None
    """Pixels that the shorter side is scaled down to; by default files are taken over as they are."""
    check_images: bool = True
    """Decode every image, so that a damaged one is found now; --no-check-images leaves that to training."""

    def check(self) -> None:
        super().check()
        if self.size is not None and self.size < 1:
            raise ValueError(f"--size must be at least 1, got {self.size}")

    def listing(self) -> Listing:
        return find_image_folder(self.input, self.class_list)

    def encode(self) -> Encode:
        return CopyImage(self.size, self.check_images, self.limit)

    def contents(self) -> dict[str, Any]:
        return {"size": self.size}


@dataclass(frozen=True, kw_only=True)
class Digits(ShardOptions):
    """scikit-learn's bundled digits, as --data-path sample has them."""

    def listing(self) -> Listing:
        return find_digits()

    def encode(self) -> Encode:
        return encode_digit


@dataclass(frozen=True)
class Verify:
    """Read all shards of a folder and compare them with the checksums of its index.json."""

    folder: tyro.conf.Positional[Path]
    """Folder of shards."""


Command = (
    Annotated[Cifar10Dvs, tyro.conf.subcommand("cifar10-dvs")]
    | Annotated[NMnist, tyro.conf.subcommand("n-mnist")]
    | Annotated[Dvs128Gesture, tyro.conf.subcommand("dvs128-gesture")]
    | Annotated[Cifar10, tyro.conf.subcommand("cifar10")]
    | Annotated[ImageFolder, tyro.conf.subcommand("image-folder")]
    | Annotated[Digits, tyro.conf.subcommand("digits")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
)
