"""Data sets of a run: their shards, the kind of samples, and random access to them."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from megasnn.augment import AUGMENTATIONS, SampleKey
from megasnn.common.files import SAMPLE_LIMIT, require_size
from megasnn.config.data import CHANGES, SAMPLE
from megasnn.data.arrays import ArrayFormat
from megasnn.data.events import FrameOptions
from megasnn.data.formats import FRAMES, EventFormat, FormatMismatch, SampleFormat
from megasnn.data.images import NORMALISATIONS, ImageFormat
from megasnn.data.remote import Address, describe_remote, expand_shards, open_remote, shown_path
from megasnn.data.shards import INDEX_NAME, FileState, TarFile, file_state, open_shard

if TYPE_CHECKING:
    from megasnn.config import DataConfig


class BrokenSample(ValueError):
    """A sample whose data cannot be decoded."""


class ShardDataset:
    """Samples of `shards`, one shard after the other, decoded by `format`. It can be pickled.

    Raises:
        ValueError: a label outside [0, num_classes), where there are classes; all are checked, before training.
    """

    def __init__(self, shards: Sequence[TarFile], format: SampleFormat, num_classes: int) -> None:
        self.format = format
        self._shards = [(shard.name, shard.tar, shard.state) for shard in shards]
        self._first = np.cumsum([0] + [len(shard.members.keys) for shard in shards])
        members = [shard.members for shard in shards]  # as arrays: lists would take several times the memory
        self._keys = np.array([key.encode() for each in members for key in each.keys])
        self.labels = np.array([label for each in members for label in each.labels], np.int64)
        first, last = ("starts", "ends") if format.reads_all else ("offsets", "sizes")
        self._offsets = np.array([offset for each in members for offset in getattr(each, first)], np.int64)
        self._sizes = np.array([size for each in members for size in getattr(each, last)], np.int64)
        if format.reads_all:
            self._sizes -= self._offsets
        wrong = np.flatnonzero((self.labels < 0) | (self.labels >= num_classes))
        if num_classes and len(wrong):
            raise ValueError(
                f"{len(wrong)} of {len(self)} labels are outside 0..{num_classes - 1}, the first one "
                f"{self.labels[wrong[0]]} of {self.describe(int(wrong[0]))}, largest {self.labels.max()}; "
                f"raise --num-classes (now {num_classes}) or mend the data"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def key(self, index: int) -> str:
        """Name of a sample inside its shard."""
        return self._keys[index].decode()

    def describe(self, index: int) -> str:
        """Name of a sample and its shard, for messages."""
        return f"sample {self.key(index)!r} of shard {self._shard(index)[0]}"

    def sample(self, index: int, key: SampleKey | None = None) -> Any:
        """Decodes a sample: an image `[H, W, C]`, event frames `[T, 2, H, W]`, or arrays by name; a key changes it at
        random.

        Raises:
            BrokenSample: it cannot be decoded, or is too large.
            ValueError: it does not fit the model, or the shard was changed, cut or removed after it was indexed.
        """
        size, offset = int(self._sizes[index]), int(self._offsets[index])
        try:
            require_size("its file", size)
            return self.format.decode(_read(*self._shard(index)[1:], size, offset), key)
        except FormatMismatch as error:
            raise ValueError(f"{self.describe(index)} {error}") from error
        except OSError as error:
            raise ValueError(f"{self.describe(index)} cannot be read: {error}; start again") from error
        except ValueError as error:
            raise BrokenSample(
                f"{self.describe(index)} cannot be decoded: {error}; mend it or leave it out "
                "(training does with --skip-broken-samples)"
            ) from error

    def fingerprint(self) -> str:
        """Hash of the samples' names, classes and data sizes in file order.

        It tells data sets apart without reading them, and is the same wherever they lie.
        """
        digest = hashlib.blake2b(digest_size=16)
        digest.update(b"".join(key + b"\0" for key in self._keys.tolist()))
        digest.update(self.labels.tobytes() + self._sizes.tobytes())
        return f"{len(self)}-{digest.hexdigest()}"

    def _shard(self, index: int) -> tuple[str, Path, FileState]:
        return self._shards[bisect_right(self._first, index) - 1]  # for one number several times faster than NumPy's


def _read(tar: Path, state: FileState, size: int, offset: int) -> bytes:
    """Raises OSError where the shard is not the file that was indexed."""
    file = _opened(tar, state).fileno()
    if file_state(os.fstat(file)) != state:
        raise OSError(f"{tar} was changed while in use")
    return os.pread(file, size, offset)


@lru_cache(maxsize=16)  # files that a process keeps open
def _opened(tar: Path, state: FileState) -> BinaryIO:
    return open(tar, "rb", buffering=0)


@dataclass(frozen=True)
class Datasets:
    """Training samples, and those to evaluate on, if any.

    Attributes:
        classes: names by number, where an index.json beside a shard tells them.
        warnings: sentences for the user, of shards that are used twice.
    """

    train: ShardDataset
    valid: ShardDataset | None
    classes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def open_datasets(
    config: DataConfig,
    input_shape: Sequence[int],
    num_classes: int,
    sample_shards: Callable[[bool], tuple[Path, Path]],
    decide: Callable[[Callable[[], Any]], Any] = lambda read: read(),
    evaluates: bool = False,
    arrays: ArrayFormat | None = None,
) -> Datasets:
    """Opens the shards of ``--data-path`` and ``--valid-data-path`` and checks all labels.

    Args:
        input_shape: of a sample, as the model takes it: (C, H, W) for images, (T, 2, H, W) for event frames.
        sample_shards: makes the shards of ``sample``, of recordings or (False) of images, to train and to validate on.
        decide: calls a function on one rank and gives its result to all: sizes of shards behind URLs are asked for so.
        evaluates: and trains on nothing.
        arrays: of samples of several files; None for images or event frames with their class.
    Raises:
        ValueError: a shard is missing, cut or empty or cannot be fetched; labels, samples or options do not fit; shards
            name a class number differently.
    """
    os.environ[SAMPLE_LIMIT] = str(config.max_sample_mb)
    format = sample_format(config, input_shape, evaluates, arrays)
    valid_path = config.valid_data_path or (SAMPLE if config.data_path == SAMPLE else None)
    made: tuple[Path, ...] = ()
    if SAMPLE in (config.data_path, valid_path):
        made = sample_shards(isinstance(format, EventFormat))

    paths = [(config.data_path, "--data-path")] + ([(valid_path, "--valid-data-path")] if valid_path else [])
    if evaluates and config.valid_data_path:
        paths = [(config.valid_data_path, "--valid-data-path")] * 2
    splits: list[Sequence[Address]] = [
        [made[split]] if path == SAMPLE else expand_shards(path, flag) for split, (path, flag) in enumerate(paths)
    ]
    shards = [open_shards(addresses, decide) for addresses in splits]
    classes = _class_names([shard for split in shards for shard in split]) if num_classes else ()
    found = [_dataset(config, format, num_classes, each) for each in shards]
    valid = found[1] if valid_path else None
    return Datasets(found[0], valid, classes, () if evaluates else tuple(_used_twice(*splits)))


def class_difference(one: Sequence[str], other: Sequence[str]) -> str | None:
    """The first class number that two lists name differently, with both names; None where there is none."""
    for number, (name, other_name) in enumerate(zip(one, other, strict=False)):
        if name != other_name:
            return f"class {number} is {name!r} and {other_name!r}"
    return None


def _class_names(shards: Sequence[TarFile]) -> tuple[str, ...]:
    """The longest list of class names of any shard. Raises ValueError where two lists differ in a number."""
    lists = {shard.classes: shard.name for shard in shards if shard.classes}
    longest = max(lists, key=len, default=())
    for classes, name in lists.items():
        if different := class_difference(longest, classes):
            raise ValueError(
                f"{different} in the {INDEX_NAME} of {lists[longest]} and of {name}: prepare one of these folders "
                "again, with --classes-of and the other one"
            )
    return longest


def _used_twice(train: Sequence[Address], valid: Sequence[Address] = ()) -> Iterator[str]:
    """Warnings of shards that have several names, and of those that are trained and evaluated on."""
    seen: dict[object, tuple[str, Address]] = {}
    for flag, addresses in (("--data-path", train), ("--valid-data-path", valid)):
        for address in addresses:
            first_flag, first = seen.setdefault(_identity(address), (flag, address))
            if first is not address:
                first_name, name = shown_path(str(first)), shown_path(str(address))
                yield f"WARNING: {first_name} of {first_flag} and {name} of {flag} are one shard"


def _identity(address: Address) -> object:
    """Device and inode of a file, which all its names share; a URL stands for itself."""
    if isinstance(address, str):
        return address
    status = address.stat()
    return status.st_dev, status.st_ino


def open_shards(
    addresses: Sequence[Address], decide: Callable[[Callable[[], Any]], Any] = lambda read: read()
) -> list[TarFile]:
    """Shards of a data path, those behind URLs fetched into the cache. `decide` is as for `open_datasets`.

    Raises:
        ValueError: as `open_shard`, `describe_remote` and `open_remote`.
    """
    urls = [each for each in addresses if isinstance(each, str)]
    remote = decide(lambda: describe_remote(urls)) if urls else []
    fetched = dict(zip(urls, open_remote(remote), strict=True))
    return [fetched[each] if isinstance(each, str) else open_shard(each) for each in addresses]


def sample_format(
    config: DataConfig, input_shape: Sequence[int], evaluates: bool = False, arrays: ArrayFormat | None = None
) -> SampleFormat:
    """Format by which a shard's samples become the model's input, without reading any.

    Raises ValueError where no shard holds such samples, or an option does not go with them.
    """
    if arrays is not None:
        return _array_format(config, evaluates, arrays)
    if len(input_shape) not in (3, 4):
        raise ValueError(
            f"shards hold images and recordings, and the model takes samples of the shape {list(input_shape)}: train "
            "it with a megasnn.Engine, on batches of your own"
        )
    takes_images = len(input_shape) == 3
    kind = ImageFormat.kind if takes_images else EventFormat.kind
    if kind not in AUGMENTATIONS[config.augment].samples:
        fitting = [name for name, each in AUGMENTATIONS.items() if kind in each.samples]
        raise ValueError(f"--augment {config.augment} is not for {kind}; choose one of {', '.join(fitting)}")
    return _image_format(config, input_shape, evaluates) if takes_images else _event_format(config, input_shape)


def _array_format(config: DataConfig, evaluates: bool, arrays: ArrayFormat) -> ArrayFormat:
    """The format with that of its image, which nothing changes at random."""
    shape = next((each.shape for each in arrays.arrays if not each.ending), None)
    kept = ("center_crop", "normalize_images") if shape else ()
    if given := config.changed("augment", "split_by", *(name for name in CHANGES if name not in kept)):
        raise ValueError(f"{', '.join(given)}: changes images, but not the arrays that belong to them; leave it out")
    if config.data_path == SAMPLE:
        raise ValueError("--data-path sample has images and classes; give shards with the arrays that the model takes")
    return arrays if shape is None else replace(arrays, image=_image_format(config, shape, evaluates))


def _dataset(config: DataConfig, format: SampleFormat, num_classes: int, shards: Sequence[TarFile]) -> ShardDataset:
    for shard in shards:
        if isinstance(format, ArrayFormat):
            if not shard.members.starts:
                raise ValueError(
                    f"shard {shard.name}: the files of a sample do not lie side by side, or {INDEX_NAME} is of "
                    "before; write it again"
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
                f"--split-by: shard {shard.name} holds finished frames; leave it out (where a checkpoint gives it, "
                "--split-by none takes it back), or preprocess again with it, or with --keep-events"
            )
    return ShardDataset(shards, format, num_classes)


def _event_format(config: DataConfig, input_shape: Sequence[int]) -> EventFormat:
    time_steps, channels, height, width = input_shape
    if given := config.changed(*CHANGES):
        raise ValueError(f"{', '.join(given)}: for images, and the model takes event frames; leave it out")
    if channels != 2 or height != width:
        raise ValueError(
            f"event frames have 2 channels and are square, not {channels} x {height} x {width}; set --in-channels to 2"
        )
    options = FrameOptions(time_steps, config.split_by or "number", height)
    return EventFormat(options, AUGMENTATIONS[config.augment])


def _image_format(config: DataConfig, input_shape: Sequence[int], evaluates: bool) -> ImageFormat:
    channels, size, width = input_shape
    if width != size:
        raise ValueError(f"images are made square, and the model takes {size} x {width}; give it a square input_shape")
    if config.split_by is not None:
        raise ValueError("--split-by: the model takes images; leave it out")
    normalisation = config.normalisation(channels, evaluates)
    in_colour = ["--rand-augment"] * (config.rand_augment is not None)
    in_colour += ["--normalize-images"] * (len(NORMALISATIONS[normalisation][0]) > 1)
    if channels != 3 and in_colour:
        raise ValueError(f"{', '.join(in_colour)}: for images in colour; set --in-channels 3, or leave it out")
    augment = AUGMENTATIONS[config.augment]
    return ImageFormat(size, channels, normalisation, config.image_recipe, config.center_crop, augment)
