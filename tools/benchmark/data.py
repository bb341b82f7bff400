"""Throughput of the loader beside a plain PyTorch DataLoader over the same files.

The DataLoader reads, decodes and augments the same samples into the same batches, with forked workers, its default. The
two sides take turns in going first.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megasnn.augment import AUGMENTATIONS
from megasnn.commands.flags import name_in
from megasnn.common.files import quantity
from megasnn.config import DataConfig
from megasnn.config.checks import at_least
from megasnn.data import BatchLoader, BatchShare, ShardDataset
from megasnn.data.datasets import open_shards, sample_format
from megasnn.data.remote import expand_shards
from tools.benchmark.harness import Case, Column, Figures, ratios, rounds, summary

Kind = Literal["images", "events"]
Batches = Iterator[int]  # sizes of batches


@dataclass(frozen=True)
class Loading(Case):
    """Throughput of the loader beside a plain PyTorch DataLoader with as many workers."""

    columns: ClassVar[Sequence[Column]] = (
        ("row", "row", ""),
        ("samples/s", "samples_per_s", ".0f"),
        ("DataLoader", "dataloader_samples_per_s", ".0f"),
        ("ratio", "ratio", ".3f"),
    )
    notes: ClassVar[str] = "ratio: samples a second against the DataLoader's, median and quartiles of the pairs"

    kinds: tuple[Kind, ...] = ("images", "events")
    """images: 3 x 32 x 32. events: frames of 10 time steps, 48 x 48."""
    data_path: str = "sample"
    """Shards to read, as in training; needs a single value of --kinds."""
    augment: Annotated[str, name_in(AUGMENTATIONS)] = "none"
    """Augmentation, as in training."""
    image_size: int | None = None
    """Height and width; by default 32 for images and 48 for events."""
    time_steps: int = 10
    """Frames per recording."""
    num_classes: int = 10
    """Number of classes."""
    batch_size: int = 32
    """Samples per batch."""
    workers: tuple[int, ...] = (0, 1, 2)
    """Numbers of worker processes."""
    samples: int = 1024
    """Timed samples per turn, after a first batch."""

    def problems(self) -> list[str]:
        wrong = at_least(self, 1, "rounds", "image_size", "time_steps", "num_classes", "batch_size", "samples")
        wrong += [f"--workers {number} must be at least 0" for number in self.workers if number < 0]
        if self.data_path != "sample" and len(self.kinds) > 1:
            wrong.append(f"--data-path {self.data_path} has one kind of samples: choose --kinds images or events")
        return wrong

    def measure(self) -> list[Figures]:
        torch.set_num_threads(1)
        found = []
        for kind in self.kinds:
            dataset = self.dataset(kind)
            pairs: dict[int, list[tuple[float, float]]] = {workers: [] for workers in self.workers}
            for number in rounds(self.rounds, untimed=1):
                for workers, rates in pairs.items():
                    pair = self._pair(dataset, workers, ours_first=number % 2 == 1)
                    if number > 0:
                        rates.append(pair)
            for workers, rates in pairs.items():
                ours, theirs = zip(*rates, strict=True)
                found.append(
                    {
                        "row": f"{kind}, {quantity(workers, 'worker')}",
                        "samples_per_s": summary(ours),
                        "dataloader_samples_per_s": summary(theirs),
                        "ratio": ratios(ours, theirs),
                    }
                )
        return found

    def dataset(self, kind: Kind) -> ShardDataset:
        """Raises ValueError for shards that cannot be used."""
        size = self.image_size or (48 if kind == "events" else 32)
        shape = (self.time_steps, 2, size, size) if kind == "events" else (3, size, size)
        config = DataConfig(data_path=self.data_path, augment=self.augment)
        shards = open_shards(expand_shards(self.data_path))
        return ShardDataset(shards, sample_format(config, shape), self.num_classes)

    def _pair(self, dataset: ShardDataset, workers: int, ours_first: bool) -> tuple[float, float]:
        """Samples a second of our loader and of theirs."""
        ours = partial(our_batches, self, dataset, workers)
        theirs = partial(their_batches, self, dataset, workers)
        if ours_first:
            our_rate = self._rate(ours)
            return our_rate, self._rate(theirs)
        their_rate = self._rate(theirs)
        return self._rate(ours), their_rate

    def _rate(self, batches: Callable[[], Any]) -> float:
        """Samples a second, after the first batch has started the workers."""
        # Ends workers of the previous turn.
        gc.collect()
        with closing(batches()) as running:
            next(running)
            begin = time.perf_counter()
            loaded = sum(islice(running, max(1, self.samples // self.batch_size)))
            return loaded / (time.perf_counter() - begin)


class Samples(Dataset[tuple[Any, int]]):
    """A map-style data set over the shards, for a DataLoader."""

    def __init__(self, dataset: ShardDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._dataset.sample(index, (1, 0, index)), int(self._dataset.labels[index])

    def collate(self, batch: list[tuple[Any, int]]) -> tuple[Tensor, Tensor]:
        images = torch.from_numpy(self._dataset.format.batch([sample for sample, _ in batch]))
        return images, torch.tensor([label for _, label in batch])


def our_batches(case: Loading, dataset: ShardDataset, workers: int) -> Batches:
    loader = BatchLoader(dataset, BatchShare(case.batch_size, case.batch_size), DataConfig(num_workers=workers), seed=1)
    with closing(loader.batches()) as batches:
        for batch in batches:
            yield batch.size


def their_batches(case: Loading, dataset: ShardDataset, workers: int) -> Batches:
    samples = Samples(dataset)
    while True:
        for images, _labels in DataLoader(
            samples, case.batch_size, shuffle=True, num_workers=workers, collate_fn=samples.collate, drop_last=True
        ):
            yield len(images)
