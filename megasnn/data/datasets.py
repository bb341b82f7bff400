"""Data sets of a run from its options: their shards and kind of samples, and checks that they fit the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasnn.augment import AUGMENTATIONS
from megasnn.config.data import CHANGES, SAMPLE
from megasnn.data.arrays import ArrayFormat
from megasnn.data.dataset import ShardDataset
from megasnn.data.formats import FRAMES, EventFormat, SampleFormat
from megasnn.data.images import NORMALISATIONS, ImageFormat
from megasnn.data.index import INDEX_NAME
from megasnn.data.paths import Address, expand_shards
from megasnn.data.remote import describe_remote, open_remote
from megasnn.data.shards import Shard, open_shard
from megasnn.events import FrameOptions
from megasnn.files import SAMPLE_LIMIT

if TYPE_CHECKING:
    from megasnn.config import DataConfig


@dataclass(frozen=True)
class Datasets:
    """Training samples, and those to evaluate on, if any."""

    train: ShardDataset
    valid: ShardDataset | None


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
        ValueError: a shard is missing, cut or empty or cannot be fetched; labels, samples or options do not fit.
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
    found = [_dataset(config, format, num_classes, open_shards(addresses, decide)) for addresses in splits]
    return Datasets(found[0], found[1] if valid_path else None)


def open_shards(
    addresses: Sequence[Address], decide: Callable[[Callable[[], Any]], Any] = lambda read: read()
) -> list[Shard]:
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


def _dataset(config: DataConfig, format: SampleFormat, num_classes: int, shards: Sequence[Shard]) -> ShardDataset:
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
