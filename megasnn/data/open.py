"""From the command line's data options to the data sets of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megasnn.data.dataset import ShardDataset
from megasnn.data.images import ImageFormat
from megasnn.data.paths import expand_shards
from megasnn.data.sample import sample_shards
from megasnn.data.shards import open_shard

if TYPE_CHECKING:
    from megasnn.config import DataConfig

SAMPLE = "sample"


@dataclass(frozen=True)
class Datasets:
    """The training samples, and those to evaluate on where there are some."""

    train: ShardDataset
    valid: ShardDataset | None


def open_datasets(config: DataConfig, image_size: int, in_channels: int, num_classes: int) -> Datasets:
    """Index the shards of ``--data-path`` and ``--valid-data-path`` and check all labels.

    ``sample`` stands for scikit-learn's digits, with their own validation split. Pixels are normalised by the
    constants of the digits, of CIFAR-10 where its recipe is asked for (``--augment cifar`` on RGB), otherwise
    by generic ones.

    Raises:
        ValueError: a shard is missing, cut or empty, a sample incomplete, a label out of range, the cache not
            writable.
    """
    format = ImageFormat(image_size, in_channels, _normalisation(config, in_channels))

    def dataset(shards: list[Path]) -> ShardDataset:
        return ShardDataset([open_shard(shard) for shard in shards], format, num_classes)

    if config.data_path == SAMPLE:
        train, valid = ([shard] for shard in sample_shards())
    else:
        train, valid = expand_shards(config.data_path), []
    if config.valid_data_path == SAMPLE:
        valid = [sample_shards()[1]]
    elif config.valid_data_path:
        valid = expand_shards(config.valid_data_path, "--valid-data-path")
    return Datasets(dataset(train), dataset(valid) if valid else None)


def _normalisation(config: DataConfig, in_channels: int) -> str:
    if config.data_path == SAMPLE:
        return "digits"
    return "cifar10" if config.augment == "cifar" and in_channels == 3 else "generic"
