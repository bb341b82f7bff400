"""A run's data sets: shards, sample format, and random access to samples."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megasnn.augment import AUGMENTATIONS, SampleKey
from megasnn.common.files import SAMPLE_LIMIT, quantity, require_size
from megasnn.config.data import CHANGES, SAMPLE
from megasnn.data.arrays import ArrayFormat
from megasnn.data.events import FrameOptions
from megasnn.data.formats import FRAMES, EventFormat, FormatMismatch, SampleFormat
from megasnn.data.images import NORMALISATIONS, ImageFormat
from megasnn.data.remote import Address, describe_remote, expand_shards, open_remote, shown_path
from megasnn.data.samples import SampleSource, broken_sample
from megasnn.data.shards import INDEX_NAME, FileState, TarFile, open_shard, read_part
from megasnn.telemetry.records import TextUnits

if TYPE_CHECKING:
    from megasnn.config import DataConfig


class ShardDataset(SampleSource):
    """Samples of shards by index, decoded by `format`; can be pickled.

    Raises:
        ValueError: a label outside [0, num_classes), if there are classes.
    """

    def __init__(self, shards: Sequence[TarFile], format: SampleFormat, num_classes: int) -> None:
        self.format: SampleFormat = format
        self._shards = [(shard.name, shard.tar, shard.state) for shard in shards]
        self._first = np.cumsum([0] + [len(shard.members.keys) for shard in shards])
        # Arrays, since lists of millions of samples would take several times the memory.
        keys = []
        for shard in shards:
            encoded = [key.encode() for key in shard.members.keys]
            keys.append(np.array(encoded, np.bytes_))
        self._keys = np.concatenate(keys)
        self.labels: NDArray[np.int64] = _joined(shards, "labels")
        if format.reads_all:
            self._offsets = _joined(shards, "starts")
            self._sizes = _joined(shards, "ends") - self._offsets
        else:
            self._offsets = _joined(shards, "offsets")
            self._sizes = _joined(shards, "sizes")
        self._require_labels(num_classes)

    def _require_labels(self, num_classes: int) -> None:
        wrong = np.flatnonzero((self.labels < 0) | (self.labels >= num_classes))
        if num_classes and len(wrong):
            first = int(wrong[0])
            raise ValueError(
                f"{len(wrong)} of {quantity(len(self), 'label')} outside 0..{num_classes - 1}: the first is "
                f"{self.labels[first]} of {self.describe(first)}, the largest {self.labels.max()}; "
                f"raise --num-classes (now {num_classes}) or correct the data"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def key(self, index: int) -> str:
        """The sample's name in its shard."""
        return self._keys[index].decode()

    def describe(self, index: int) -> str:
        """Sample and shard, for messages."""
        return f"sample {self.key(index)!r} of shard {self._shard(index)[0]}"

    def sample(self, index: int, key: SampleKey | None = None) -> Any:
        """Decodes an image `[H, W, C]`, event frames `[T, 2, H, W]`, or named arrays; a key augments them.

        Raises:
            BrokenSample: damaged or too large.
            ValueError: it does not fit the model, or its shard has changed.
        """
        size = int(self._sizes[index])
        offset = int(self._offsets[index])
        _, tar, state = self._shard(index)
        try:
            require_size("its file", size)
            return self.format.decode(read_part(tar, state, size, offset), key)
        except FormatMismatch as error:
            raise ValueError(f"{self.describe(index)} {error}") from error
        except OSError as error:
            raise ValueError(f"{self.describe(index)} cannot be read: {error}; restart the run") from error
        except ValueError as error:
            raise broken_sample(self.describe(index), f"cannot be decoded: {error}", "repair or remove it") from error

    def fingerprint(self) -> str:
        """Hash over all names, classes and sizes in file order."""
        # Without names of shards and offsets in them: samples and their order count.
        digest = hashlib.blake2b(digest_size=16)
        digest.update(b"".join(key + b"\0" for key in self._keys.tolist()))
        digest.update(self.labels.tobytes() + self._sizes.tobytes())
        return f"{len(self)}-{digest.hexdigest()}"

    def _shard(self, index: int) -> tuple[str, Path, FileState]:
        # For one number, bisect is several times faster than np.searchsorted.
        return self._shards[bisect_right(self._first, index) - 1]


def _joined(shards: Sequence[TarFile], field: str) -> NDArray[np.int64]:
    return np.concatenate([np.array(getattr(shard.members, field), np.int64) for shard in shards])


@dataclass(frozen=True)
class Datasets:
    """Training samples, and validation samples, if any.

    Attributes:
        classes: names by number, from index.json; may be empty.
        warnings: for the user.
        train_units, valid_units: of tokens; None for other samples.
        tokenizer: its identity; None if unknown, and for other samples.
    """

    train: SampleSource
    valid: SampleSource | None
    classes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    train_units: TextUnits | None = None
    valid_units: TextUnits | None = None
    tokenizer: str | None = None


def open_datasets(
    config: DataConfig,
    input_shape: Sequence[int],
    num_classes: int,
    sample_shards: Callable[[bool], tuple[Path, Path]],
    decide: Callable[[Callable[[], Any]], Any] = lambda read: read(),
    evaluates: bool = False,
    arrays: ArrayFormat | None = None,
) -> Datasets:
    """Opens ``--data-path`` and ``--valid-data-path`` and checks all labels.

    Args:
        input_shape: (C, H, W) for images, (T, 2, H, W) for event frames.
        sample_shards: writes the data for ``sample``; True for recordings.
        decide: calls a function on one rank, returns its result on all.
        arrays: format for several files per sample.
    Raises:
        ValueError: a shard is missing, damaged or empty; labels, samples, options or class names do not fit.
    """
    os.environ[SAMPLE_LIMIT] = str(config.max_sample_mb)  # worker processes inherit it
    format = sample_format(config, input_shape, evaluates, arrays)
    valid_path = config.valid_data_path or (SAMPLE if config.data_path == SAMPLE else None)
    made: tuple[Path, ...] = ()
    if SAMPLE in (config.data_path, valid_path):
        made = sample_shards(isinstance(format, EventFormat))

    paths = [("--data-path", config.data_path)]
    if valid_path:
        paths.append(("--valid-data-path", valid_path))
    # A run that only evaluates opens no training shards, which may be missing.
    if evaluates and config.valid_data_path:
        paths = [("--valid-data-path", config.valid_data_path)] * 2
    addresses: list[Sequence[Address]] = []
    for number, (flag, path) in enumerate(paths):
        addresses.append([made[number]] if path == SAMPLE else expand_shards(path, flag))
    shards = [open_shards(each, decide) for each in addresses]
    classes = _class_names([*chain(*shards)]) if num_classes else ()
    datasets = [_dataset(config, format, num_classes, each) for each in shards]
    warnings: list[str] = []
    for (flag, _), each in zip(paths, shards, strict=True):
        warnings += _mixed_splits(flag, each)
    if not evaluates:
        warnings += _used_twice(*addresses)
    distinct = tuple(dict.fromkeys(warnings))
    valid = datasets[1] if valid_path else None
    return Datasets(datasets[0], valid, classes, distinct)


def class_difference(one: Sequence[str], other: Sequence[str]) -> str | None:
    """First class number with different names, and both names; None if the lists agree."""
    for number, (name, other_name) in enumerate(zip(one, other, strict=False)):
        if name != other_name:
            return f"class {number} is {name!r} and {other_name!r}"
    return None


def _class_names(shards: Sequence[TarFile]) -> tuple[str, ...]:
    """The longest list. Raises ValueError if two lists name a class differently."""
    lists = {shard.classes: shard.name for shard in shards if shard.classes}
    longest = max(lists, key=len, default=())
    for classes, name in lists.items():
        if different := class_difference(longest, classes):
            raise ValueError(
                f"{different} in the {INDEX_NAME} of {lists[longest]} and of {name}: prepare one of these folders "
                "again, with --classes-of and the other folder"
            )
    return longest


def _mixed_splits(flag: str, shards: Sequence[TarFile]) -> Iterator[str]:
    # A folder of tools/preprocess_data.py holds all splits, train-*.tar beside test-*.tar.
    splits = sorted({shard.split for shard in shards if shard.split})
    if len(splits) > 1:
        shards_of_one = " or ".join(f"{split}-*.tar" for split in splits)
        yield f"WARNING: {flag} holds the splits {', '.join(splits)}; to use one of them, name {shards_of_one} there"


def _used_twice(train: Sequence[Address], valid: Sequence[Address] = ()) -> Iterator[str]:
    """Warnings about shards named twice, or in training and validation."""
    # The first name of each shard. Training on validation samples is allowed, but not silently.
    seen: dict[object, tuple[str, Address]] = {}
    for flag, addresses in (("--data-path", train), ("--valid-data-path", valid)):
        for address in addresses:
            first_flag, first = seen.setdefault(_identity(address), (flag, address))
            if first is not address:
                first_name = shown_path(str(first))
                name = shown_path(str(address))
                yield f"WARNING: {first_name} of {first_flag} and {name} of {flag} are one shard"


def _identity(address: Address) -> object:
    if isinstance(address, str):
        return address
    status = address.stat()
    # Equal for all links to a file.
    return status.st_dev, status.st_ino


def open_shards(
    addresses: Sequence[Address], decide: Callable[[Callable[[], Any]], Any] = lambda read: read()
) -> list[TarFile]:
    """Opens shards, fetching URLs into the cache. Raises ValueError as `open_shard` and `open_remote`."""
    urls = [each for each in addresses if isinstance(each, str)]
    # One rank asks the servers, so that all ranks fetch the same sizes and versions.
    remote = decide(lambda: describe_remote(urls)) if urls else []
    fetched = dict(zip(urls, open_remote(remote), strict=True))
    return [fetched[each] if isinstance(each, str) else open_shard(each) for each in addresses]


def sample_format(
    config: DataConfig, input_shape: Sequence[int], evaluates: bool = False, arrays: ArrayFormat | None = None
) -> SampleFormat:
    """Format from samples to the model's input. Raises ValueError if shape or options do not fit."""
    if config.tokenizer is not None:
        raise ValueError(f"--tokenizer {config.tokenizer}: for text, and the model takes no tokens; remove it")
    if arrays is not None:
        return _array_format(config, evaluates, arrays)
    if len(input_shape) not in (3, 4):
        raise ValueError(
            f"the model takes samples of shape {list(input_shape)}, and shards hold images and recordings: train it "
            "with megasnn.Engine on your own batches"
        )
    takes_images = len(input_shape) == 3
    kind = ImageFormat.kind if takes_images else EventFormat.kind
    if kind not in AUGMENTATIONS[config.augment].samples:
        fitting = [name for name, each in AUGMENTATIONS.items() if kind in each.samples]
        raise ValueError(f"--augment {config.augment} is not for {kind}; choose one of {', '.join(fitting)}")
    return _image_format(config, input_shape, evaluates) if takes_images else _event_format(config, input_shape)


def _array_format(config: DataConfig, evaluates: bool, arrays: ArrayFormat) -> ArrayFormat:
    shape = next((each.shape for each in arrays.arrays if not each.ending), None)
    allowed = ("center_crop", "normalize_images") if shape else ()
    refused = [name for name in CHANGES if name not in allowed]
    # Random changes of an image would not reach its masks and arrays.
    if flags := config.changed("augment", "split_by", *refused):
        raise ValueError(f"{', '.join(flags)}: changes images, but not the arrays of the same sample; remove it")
    if config.data_path == SAMPLE:
        raise ValueError("--data-path sample has images and classes; give shards with the model's arrays")
    return arrays if shape is None else replace(arrays, image=_image_format(config, shape, evaluates))


def _dataset(config: DataConfig, format: SampleFormat, num_classes: int, shards: Sequence[TarFile]) -> ShardDataset:
    for shard in shards:
        if isinstance(format, ArrayFormat):
            if not shard.members.starts:
                raise ValueError(
                    f"shard {shard.name}: the files of a sample are not adjacent, or {INDEX_NAME} is of an older "
                    "version; write the shard again"
                )
            continue
        if wrong := [suffix for suffix in shard.members.suffixes if suffix not in format.suffixes]:
            hint = "" if isinstance(format, EventFormat) else "; Spikformer takes events with --event-frames"
            raise ValueError(
                f"shard {shard.name} holds .{wrong[0]} files, and the model takes {format.kind} "
                f"(.{', .'.join(format.suffixes)}){hint}"
            )
        if FRAMES in shard.members.suffixes and config.split_by is not None:
            raise ValueError(
                f"--split-by: shard {shard.name} holds finished frames; remove the flag (--split-by none overrides a "
                "checkpoint's), or preprocess again with it or with --keep-events"
            )
    return ShardDataset(shards, format, num_classes)


def _event_format(config: DataConfig, input_shape: Sequence[int]) -> EventFormat:
    time_steps, channels, height, width = input_shape
    if flags := config.changed(*CHANGES):
        raise ValueError(f"{', '.join(flags)}: for images, and the model takes event frames; remove it")
    if channels != 2 or height != width:
        raise ValueError(
            f"event frames have 2 channels and are square, not {channels} x {height} x {width}; set --in-channels to 2"
        )
    options = FrameOptions(time_steps, config.split_by or "number", height)
    return EventFormat(options, AUGMENTATIONS[config.augment])


def _image_format(config: DataConfig, input_shape: Sequence[int], evaluates: bool) -> ImageFormat:
    channels, size, width = input_shape
    if width != size:
        raise ValueError(f"images become square, and the model takes {size} x {width}; set a square input_shape")
    if config.split_by is not None:
        raise ValueError("--split-by: for recordings, and the model takes images; remove it")
    normalisation = config.normalisation(channels, evaluates)
    for_colour = []
    if config.rand_augment is not None:
        for_colour.append("--rand-augment")
    if len(NORMALISATIONS[normalisation][0]) > 1:
        for_colour.append("--normalize-images")
    if channels != 3 and for_colour:
        raise ValueError(f"{', '.join(for_colour)}: for colour images; set --in-channels 3, or remove it")
    augment = AUGMENTATIONS[config.augment]
    return ImageFormat(size, channels, normalisation, config.image_recipe, config.center_crop, augment)
