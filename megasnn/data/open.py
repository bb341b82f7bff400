"""From the command line's data options to the data sets of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megasnn.config.checks import flag
from megasnn.config.data import CHANGES, SAMPLE
from megasnn.data.dataset import ShardDataset
from megasnn.data.event_files import EVENTS, FRAMES, FrameSettings
from megasnn.data.event_frames import EventFormat
from megasnn.data.formats import SampleFormat
from megasnn.data.images import IMAGE_SUFFIXES, NORMALISATIONS, ImageFormat
from megasnn.data.paths import Address, expand_shards
from megasnn.data.remote.shard import FetchOptions
from megasnn.data.shard_list import Decide, by_itself, open_shards
from megasnn.data.shards import Shard

if TYPE_CHECKING:
    from megasnn.config import DataConfig

_KINDS = {**dict.fromkeys(IMAGE_SUFFIXES, "images"), FRAMES: "event frames", EVENTS: "events"}


@dataclass(frozen=True)
class Datasets:
    """The training samples, and those to evaluate on where there are some."""

    train: ShardDataset[SampleFormat]
    valid: ShardDataset[SampleFormat] | None


def open_datasets(
    config: DataConfig,
    input_shape: Sequence[int],
    num_classes: int,
    sample_shards: Callable[[bool], tuple[Path, Path]] | None = None,
    decide: Decide = by_itself,
    evaluates: bool = False,
) -> Datasets:
    """Index the shards of ``--data-path`` and ``--valid-data-path`` and check all labels.

    ``sample`` stands for scikit-learn's digits, with their own validation split: as images, or as recordings of a
    simulated event camera. Pixels of images are normalised by the same constants in training and in evaluation
    (`DataConfig.normalisation`).

    Args:
        input_shape: of a sample, as the model takes it: (C, H, W) for images, (T, 2, H, W) for event frames.
        sample_shards: makes the shards that ``sample`` stands for, of recordings or (False) of images, to train and
            to validate on; None where ``sample`` is not asked for.
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
    config: DataConfig, format: SampleFormat, num_classes: int, decide: Decide, addresses: Sequence[Address]
) -> ShardDataset[SampleFormat]:
    unpacked = None if config.max_unpacked_gb is None else int(config.max_unpacked_gb * 1e9)
    options = FetchOptions(config.fetch_ahead, config.fetch_timeout, unpacked)
    shards = open_shards(addresses, tuple(_KINDS), format.limit, options, decide)
    for shard in shards:
        _check_kind(config, shard, format)
    return ShardDataset(shards, format, num_classes)


def _check_kind(config: DataConfig, shard: Shard, format: SampleFormat) -> None:
    """Raises ValueError unless the shard holds what the model takes, and the options go with that."""
    found = {suffix.decode() for suffix in shard.suffixes.tolist()}
    if not found <= set(format.suffixes):
        kinds = " and ".join(sorted({_KINDS[suffix] for suffix in found}))
        hint = "" if isinstance(format, EventFormat) else "; Spikformer takes events with --event-frames"
        raise ValueError(f"shard {shard.source} holds {kinds}, and the model takes {_kind(format)}{hint}")
    if FRAMES not in found or not isinstance(format, EventFormat):
        return
    if len(shard.frames) and shard.frames[0] != format.settings.time_steps:
        raise ValueError(
            f"shard {shard.source} holds samples of {shard.frames[0]} frames, and the model takes --time-steps "
            f"{format.settings.time_steps}; set --time-steps {shard.frames[0]}, or run megasnn-preprocess-data again "
            f"(with --keep-events, any number goes)"
        )
    given = [name for name, value in _frame_options(config).items() if value is not None]
    if given:
        raise ValueError(
            f"{', '.join(given)}: shard {shard.source} holds finished frames; leave it out (where a checkpoint gives "
            f"it, {given[0]} none takes it back), or preprocess again with it (or with --keep-events, to choose in "
            f"training)"
        )


def _kind(format: SampleFormat) -> str:
    return "event frames or events" if isinstance(format, EventFormat) else "images"


def _event_format(config: DataConfig, input_shape: Sequence[int]) -> EventFormat:
    time_steps, channels, height, width = input_shape
    if given := config.changed(*CHANGES):
        raise ValueError(f"{', '.join(given)}: for images, and the model takes event frames; leave it out")
    if channels != 2 or height != width:
        raise ValueError(
            f"event frames have 2 channels and are square, not {channels} x {height} x {width}; set --in-channels to 2"
        )
    return EventFormat(
        FrameSettings(
            time_steps=time_steps,
            split_by=config.split_by or "number",
            frame_duration=config.frame_duration,
            size=height,
            normalize=config.normalize_frames or "none",
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
    in_colour = [flag(name) for name in ("rand_augment",) if getattr(config, name)]
    in_colour += ["--normalize-images"] * (len(NORMALISATIONS[normalisation][0]) > 1)
    if channels != 3 and in_colour:
        raise ValueError(f"{', '.join(in_colour)}: for images in colour; set --in-channels 3, or leave it out")
    limit, center = config.max_sample_mb << 20, config.center_crop
    return ImageFormat(size, channels, normalisation, limit, config.image_recipe, center)


def _frame_options(config: DataConfig) -> dict[str, object]:
    """The flags that say how events become frames."""
    return {
        "--split-by": config.split_by,
        "--frame-duration": config.frame_duration,
        "--normalize-frames": config.normalize_frames,
    }
