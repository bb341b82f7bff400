"""Samples a second of the loader, beside a plain PyTorch DataLoader over the same files and beside decoding alone; and
how long training waits.

The DataLoader's data set reads, decodes and changes a sample as ours does: the same shards, index, decoder and
augmentation, and the same float batches; its workers are forked, as is its default. Rows take turns, and the two sides
of a row are first in turn, so that a machine whose speed drifts slows all of them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count, islice
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megasnn.augment import AUGMENTATIONS, Augmentation
from megasnn.config import DataConfig
from megasnn.config.checks import at_least
from megasnn.config.fields import name_in
from megasnn.data import ShardDataset, open_datasets
from megasnn.models.spikformer.dimensions import Spikformer
from megasnn.models.vgg_dvs.dimensions import CIFAR10_DVS, VggDvs
from megasnn.preprocess.sample import shards_of_sample
from tools.benchmark.harness import Case, Figures, Flags, Part, ratios, rounds, say, summary
from tools.benchmark.log import Line
from tools.benchmark.models import Dimensions
from tools.benchmark.table import change, quartiles, shown, table
from tools.benchmark.waiting import Waiting, measure_waiting, one_rank_loader

WORKERS = (0, 1, 2)
HEADINGS = (
    "",
    "samples/s",
    "quartiles",
    "DataLoader",
    "ratio",
    "x decoding",
    "training step, ms",
    "of it waiting",
    "change",
)
NOTES = """\
ratio: against the DataLoader with as many workers; x decoding: against one process that reads, decodes and
changes samples and does nothing else with them; both compared round by round"""

Batches = Generator[int, None, None]  # the size of each


@dataclass(frozen=True)
class LoadingBenchmark(Flags):
    """Two rows for each number of workers, and the training steps of one model with each of them."""

    kind: Literal["events", "images"] = "events"
    """events: frames for the VGG. images: for Spikformer."""
    data_path: str = "sample"
    """Shards, as for training."""
    augment: Annotated[str, name_in(AUGMENTATIONS)] = "none"
    """As for training; the DataLoader's rows change their samples in the same way."""
    image_size: int = 48
    """Height and width."""
    time_steps: int = 10
    """Frames of a sample; for images, time steps of the model."""
    channels: str = CIFAR10_DVS
    """Of the VGG, with --kind events; for images the model is spikformer_cifar10."""
    num_classes: int = 10
    """Number of classes."""
    batch_size: int = 32
    """Samples of a batch."""
    workers: tuple[int, ...] = WORKERS
    """Numbers of workers: processes of ours, and of the DataLoader's."""
    samples: int = 1024
    """Samples that a row loads in its turn."""
    rounds: int = 5
    """How often each row has its turn; one untimed turn comes before."""
    steps: int = 4
    """Timed training steps of a model for each number of workers; 0 trains nothing."""

    def problems(self) -> list[str]:
        sizes = ("image_size", "time_steps", "num_classes", "batch_size", "samples", "rounds")
        wrong = at_least(self, 1, *sizes) + at_least(self, 0, "steps")
        wrong += [f"--workers {number} must be at least 0" for number in self.workers if number < 0]
        if self.samples < self.batch_size:
            wrong.append(f"--samples {self.samples} are less than one --batch-size {self.batch_size}")
        return wrong or (self.dimensions().problems(1) if self.steps else [])

    @property
    def input_shape(self) -> tuple[int, ...]:
        size = self.image_size
        return (self.time_steps, 2, size, size) if self.kind == "events" else (3, size, size)

    def dimensions(self) -> Dimensions:
        """Of the model that is trained."""
        size, steps, classes = self.image_size, self.time_steps, self.num_classes
        if self.kind == "events":
            return VggDvs(channels=self.channels, image_size=size, time_steps=steps, num_classes=classes)
        return Spikformer(image_size=size, time_steps=steps, num_classes=classes)


def measure(flags: LoadingBenchmark) -> Iterator[Part]:
    """Raises ValueError when the shards cannot be used."""
    torch.set_num_threads(1)
    data = DataConfig(data_path=flags.data_path, augment=flags.augment)
    dataset = open_datasets(data, flags.input_shape, flags.num_classes, shards_of_sample).train
    rates = _measure(flags, dataset)
    waiting = {workers: _waiting(flags, dataset, workers) for workers in flags.workers if flags.steps}
    yield Part([_figures(flags, workers, rates[workers], waiting.get(workers)) for workers in rates])


@dataclass(frozen=True)
class Rates:
    """Samples a second, one figure for each round.

    Attributes:
        ours, theirs: the loader's, and the DataLoader's with as many workers.
        decoding: of one process that only reads, decodes and changes samples, and gives them to nobody.
    """

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    decoding: list[float] = field(default_factory=list)


class Samples(Dataset[tuple[Any, int]]):
    """A map-style data set over the shards, as one would write it for a DataLoader."""

    def __init__(self, dataset: ShardDataset, augment: str = "none") -> None:
        self._dataset, self._augment = dataset, dataset.format.augmentation(augment)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return augmented(self._dataset, index, self._augment, 1, 0, index), int(self._dataset.labels[index])

    def collate(self, batch: list[tuple[Any, int]]) -> tuple[Tensor, Tensor]:
        images = torch.from_numpy(self._dataset.format.batch([sample for sample, _ in batch]))
        return images, torch.tensor([label for _, label in batch])


def augmented(dataset: ShardDataset, sample: int, augment: Augmentation, seed: int, epoch: int, number: int) -> Any:
    """A decoded sample, changed under the key of seed, epoch and number."""
    decode = augment.decoder(seed, epoch, number) if augment.decoder else None
    return augment(dataset.sample(sample, decode), seed, epoch, number)


def _measure(flags: LoadingBenchmark, dataset: ShardDataset) -> dict[int, Rates]:
    """By number of workers; in each round every side has its turn, after one round that does not count."""
    rates = {workers: Rates() for workers in flags.workers}
    for turn in rounds(flags.rounds, untimed=1):
        for workers, of_row in rates.items():
            sides = [
                (of_row.ours, partial(_our_batches, flags, dataset, workers)),
                (of_row.theirs, partial(_their_batches, flags, dataset, workers)),
                (of_row.decoding, partial(_decoded_batches, flags, dataset)),
            ]
            for found, batches in sides[:: -1 if turn % 2 else 1]:
                rate = _rate(flags, batches)
                if turn > 0:
                    found.append(rate)
    return rates


def _waiting(flags: LoadingBenchmark, dataset: ShardDataset, workers: int) -> Waiting:
    say(f"training with {workers} workers")
    loader = one_rank_loader(dataset, flags.augment, flags.batch_size, workers)
    return measure_waiting(flags.dimensions(), loader, flags.batch_size, flags.steps)


def _our_batches(flags: LoadingBenchmark, dataset: ShardDataset, workers: int) -> Batches:
    with closing(one_rank_loader(dataset, flags.augment, flags.batch_size, workers).batches()) as batches:
        for batch in batches:
            yield batch.size


def _their_batches(flags: LoadingBenchmark, dataset: ShardDataset, workers: int) -> Batches:
    samples = Samples(dataset, flags.augment)
    while True:
        for images, _labels in DataLoader(
            samples, flags.batch_size, shuffle=True, num_workers=workers, collate_fn=samples.collate, drop_last=True
        ):
            yield len(images)


def _decoded_batches(flags: LoadingBenchmark, dataset: ShardDataset) -> Batches:
    """What no loader in one process can be faster than. Samples are in the order of an epoch."""
    augment = dataset.format.augmentation(flags.augment)
    for epoch in count(1):
        order = torch.randperm(len(dataset)).tolist()
        for first in range(0, len(order) - flags.batch_size + 1, flags.batch_size):
            for sample in order[first : first + flags.batch_size]:
                augmented(dataset, sample, augment, 1, epoch, sample)
            yield flags.batch_size


def _rate(flags: LoadingBenchmark, batches: Callable[[], Batches]) -> float:
    """Samples a second after the first batch: workers have started then, and those of the turn before are gone."""
    gc.collect()
    with closing(batches()) as running:
        next(running)
        begin = time.perf_counter()
        loaded = sum(islice(running, max(1, flags.samples // flags.batch_size)))
        return loaded / (time.perf_counter() - begin)


def _figures(flags: LoadingBenchmark, workers: int, rates: Rates, waiting: Waiting | None) -> Figures:
    """The figures of a number of workers. Ratios are taken round by round."""
    configuration = {
        name: value for name, value in asdict(flags).items() if name not in ("output", "rounds", "samples")
    }
    return {
        "row": f"{flags.kind}, {workers} workers",
        "configuration": {**configuration, "workers": workers},
        "samples_per_s": summary(rates.ours),
        "dataloader_samples_per_s": summary(rates.theirs),
        "throughput_ratio": ratios(rates.ours, rates.theirs),
        "decoding_ratio": ratios(rates.ours, rates.decoding),
        "step_ms": waiting.step_ms if waiting else None,
        "waiting_share": waiting.share if waiting else None,
    }


def report(flags: LoadingBenchmark, lines: Sequence[Line], earlier: Sequence[Line | None]) -> str:
    machine, shape = lines[0]["machine"], " x ".join(map(str, flags.input_shape))
    return (
        f"{flags.kind} {flags.data_path}, {shape}, batches of {flags.batch_size}, augmentation {flags.augment}; "
        f"{machine['cpu']}, {machine['cores']} cores, one thread for each rank\n\n"
        f"{table(HEADINGS, list(map(_cells, lines, earlier)))}"
    )


def _cells(line: Line, last: Line | None) -> list[str]:
    rate = line["samples_per_s"]
    return [
        line["row"],
        f"{rate['median']:.0f}",
        quartiles(rate, ".0f"),
        f"{line['dataloader_samples_per_s']['median']:.0f}",
        f"{line['throughput_ratio']['median']:.2f}",
        f"{line['decoding_ratio']['median']:.2f}",
        shown(line["step_ms"]),
        shown(line["waiting_share"], ".2%"),
        change(line, last, "samples_per_s", "median"),
    ]


LOADING = Case(LoadingBenchmark, measure, report, NOTES)
