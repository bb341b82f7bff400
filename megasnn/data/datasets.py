"""From the options of a run to its data sets: which shards, what kind of samples, and whether they fit the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasnn.config.data import CHANGES, SAMPLE
from megasnn.data.dataset import BrokenSample, ShardDataset
from megasnn.data.event_files import FRAMES
from megasnn.data.event_frames import EventFormat
from megasnn.data.fetch import describe_remote, open_remote
from megasnn.data.images import NORMALISATIONS, ImageFormat
from megasnn.data.paths import Address, expand_shards
from megasnn.data.shards import Shard, open_shard
from megasnn.events import FrameOptions

if TYPE_CHECKING:
    from megasnn.config import DataConfig

Decide = Callable[[Callable[[], Any]], Any]
"""Calls a function on one rank and gives its result to all."""


@dataclass(frozen=True)
class Datasets:
    """The training samples, and those to evaluate on where there are some."""

    train: ShardDataset
    valid: ShardDataset | None


def open_datasets(
    config: DataConfig,
    input_shape: Sequence[int],
    num_classes: int,
    sample_shards: Callable[[bool], tuple[Path, Path]] | None = None,
    decide: Decide = lambda read: read(),
    evaluates: bool = False,
) -> Datasets:
    """Opens the shards of ``--data-path`` and ``--valid-data-path`` and checks all labels.

    ``sample`` stands for scikit-learn's digits, with their own validation split: as images, or as recordings of a
    simulated event camera.

    Args:
        input_shape: of a sample, as the model takes it: (C, H, W) for images, (T, 2, H, W) for event frames.
        sample_shards: makes the shards that ``sample`` stands for, of recordings or (False) of images, to train and
            to validate on; None where ``sample`` is not asked for.
        decide: what lies behind URLs is asked for on one rank.
        evaluates: and trains on nothing.

    Raises:
        ValueError: a shard is missing, cut or empty or cannot be fetched, a sample incomplete, a label out of range,
            the cache not writable; the shards hold another kind of samples than the model takes, or frames of another
            shape; an option does not go with them.
    """
    format = sample_format(config, input_shape, evaluates)
    train, valid = _paths(config, partial(sample_shards, isinstance(format, EventFormat)) if sample_shards else None)
    opened = partial(_dataset, config, format, num_classes, decide)
    return Datasets(opened(train), opened(valid) if valid else None)


def open_shards(
    addresses: Sequence[Address], fetch_timeout: float, decide: Decide = lambda read: read()
) -> list[Shard]:
    """The shards of a data path, those behind URLs fetched into the cache.

    Raises:
        ValueError: as `open_shard`, `describe_remote` and `open_remote`.
    """
    urls = [each for each in addresses if isinstance(each, str)]
    remote = decide(lambda: describe_remote(urls, fetch_timeout)) if urls else []
    fetched = dict(zip(urls, open_remote(remote, fetch_timeout), strict=True))
    return [fetched[each] if isinstance(each, str) else open_shard(each) for each in addresses]


def sample_format(config: DataConfig, input_shape: Sequence[int], evaluates: bool = False) -> EventFormat | ImageFormat:
    """How a shard's samples become what the model takes, without looking at any.

    Args:
        evaluates: and trains on nothing.
    Raises:
        ValueError: no shard holds such samples, or an option does not go with them.
    """
    if len(input_shape) not in (3, 4):
        raise ValueError(
            f"shards hold images and recordings, and the model takes samples of the shape {list(input_shape)}: train "
            "it with a megasnn.Engine, on batches of your own"
        )
    events = len(input_shape) == 4
    format = _event_format(config, input_shape) if events else _image_format(config, input_shape, evaluates)
    format.augmentation(config.augment)
    return format


def _paths(
    config: DataConfig, sample: Callable[[], tuple[Path, Path]] | None
) -> tuple[Sequence[Address], Sequence[Address]]:
    """The shards to train on and those to validate on."""
    valid_path = config.valid_data_path or (SAMPLE if config.data_path == SAMPLE else None)
    made: tuple[Path, ...] = ()
    if SAMPLE in (config.data_path, valid_path):
        if sample is None:
            raise ValueError(f"--data-path {SAMPLE}: its shards are not made here; name shards")
        made = sample()
    train: Sequence[Address] = [made[0]] if config.data_path == SAMPLE else expand_shards(config.data_path)
    if valid_path is None:
        return train, []
    return train, [made[1]] if valid_path == SAMPLE else expand_shards(valid_path, "--valid-data-path")


def _dataset(
    config: DataConfig,
    format: EventFormat | ImageFormat,
    num_classes: int,
    decide: Decide,
    addresses: Sequence[Address],
) -> ShardDataset:
    shards = open_shards(addresses, config.fetch_timeout, decide)
    for shard in shards:
        _check_kind(config, shard, format)
    dataset = ShardDataset(shards, format, num_classes)
    if FRAMES in shards[0].suffixes:
        with suppress(BrokenSample):
            dataset.sample(0)  # frames for another number of time steps are refused before the model is built
    return dataset


def _check_kind(config: DataConfig, shard: Shard, format: EventFormat | ImageFormat) -> None:
    """Raises ValueError unless the shard holds what the model takes, and the options go with that."""
    if wrong := [suffix for suffix in shard.suffixes if suffix not in format.suffixes]:
        hint = "" if isinstance(format, EventFormat) else "; Spikformer takes events with --event-frames"
        raise ValueError(
            f"shard {shard.name} holds .{wrong[0]} files, and the model takes {format.kind} "
            f"(.{', .'.join(format.suffixes)}){hint}"
        )
    given = [name for name, value in _frame_options(config).items() if value is not None]
    if FRAMES in shard.suffixes and given:
        raise ValueError(
            f"{', '.join(given)}: shard {shard.name} holds finished frames; leave it out (where a checkpoint gives it, "
            f"{given[0]} none takes it back), or preprocess again with it, or with --keep-events"
        )


def _event_format(config: DataConfig, input_shape: Sequence[int]) -> EventFormat:
    time_steps, channels, height, width = input_shape
    if given := config.changed(*CHANGES):
        raise ValueError(f"{', '.join(given)}: for images, and the model takes event frames; leave it out")
    if channels != 2 or height != width:
        raise ValueError(
            f"event frames have 2 channels and are square, not {channels} x {height} x {width}; set --in-channels to 2"
        )
    return EventFormat(
        FrameOptions(
            time_steps=time_steps,
            split_by=config.split_by or "number",
            size=height,
        ),
        config.max_sample_mb << 20,
    )


def _image_format(config: DataConfig, input_shape: Sequence[int], evaluates: bool) -> ImageFormat:
    channels, size, width = input_shape
    if width != size:
        raise ValueError(f"images are made square, and the model takes {size} x {width}; give it a square input_shape")
    given = [name for name, value in _frame_options(config).items() if value is not None]
    if given:
        raise ValueError(f"{', '.join(given)}: the model takes images; leave it out")
    normalisation = config.normalisation(channels, evaluates)
    in_colour = ["--rand-augment"] * (config.rand_augment is not None)
    in_colour += ["--normalize-images"] * (len(NORMALISATIONS[normalisation][0]) > 1)
    if channels != 3 and in_colour:
        raise ValueError(f"{', '.join(in_colour)}: for images in colour; set --in-channels 3, or leave it out")
    limit, center = config.max_sample_mb << 20, config.center_crop
    return ImageFormat(size, channels, normalisation, limit, config.image_recipe, center)


def _frame_options(config: DataConfig) -> dict[str, object]:
    """The flags that say how events become frames."""
    return {
        "--split-by": config.split_by,
    }
