"""Samples a second of the loader, beside a plain PyTorch DataLoader over the same files; and how long training waits.

The DataLoader's data set reads, decodes and changes a sample as ours does: the same shards, index, decoder and
augmentation, and the same float batches; its workers are forked, as is its default. Rows take turns, and the two sides
of a row are first in turn, so that a machine whose speed drifts slows all of them.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megasnn.augment import AUGMENTATIONS
from megasnn.benchmark.log import append_lines, latest_alike, read_lines, surroundings
from megasnn.benchmark.results import summary
from megasnn.benchmark.waiting import Waiting, measure_waiting
from megasnn.config import DataConfig
from megasnn.config.checks import ConfigError, at_least
from megasnn.config.names import name_in
from megasnn.data import BatchLoader, ShardDataset, open_datasets
from megasnn.data.formats import SampleFormat

WORKERS = (0, 1, 2)

Batches = Generator[int, None, None]  # the size of each


@dataclass(frozen=True)
class LoadingBenchmark:
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
    channels: str = "64,128,P,256,256,P,512,512,P,512,512,P"
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
    output: Path = Path("benchmark.jsonl")
    """File to append one JSON line per row to; earlier lines in it are compared with."""

    def check(self) -> None:
        """Raises ConfigError with everything that cannot be run."""
        sizes = ("image_size", "time_steps", "num_classes", "batch_size", "samples", "rounds")
        wrong = at_least(self, 1, *sizes) + at_least(self, 0, "steps")
        wrong += [f"--workers {number} must be at least 0" for number in self.workers if number < 0]
        if self.samples < self.batch_size:
            wrong.append(f"--samples {self.samples} are less than one --batch-size {self.batch_size}")
        if wrong:
            raise ConfigError(wrong)

    @property
    def input_shape(self) -> tuple[int, ...]:
        size = self.image_size
        return (self.time_steps, 2, size, size) if self.kind == "events" else (3, size, size)


def run_loading(config: LoadingBenchmark) -> list[dict[str, Any]]:
    """Measures, prints the table, appends to the log. Returns the lines that were appended.

    Raises:
        ConfigError: values out of range.
        ValueError: the shards cannot be used, or the log holds a line that is not JSON.
    """
    config.check()
    earlier = read_lines(config.output)
    torch.set_num_threads(1)
    data = DataConfig(data_path=config.data_path, augment=config.augment)
    dataset = open_datasets(data, config.input_shape, config.num_classes).train
    rates = _measure(config, dataset)
    waiting = {number: measure_waiting(config, data, number) for number in config.workers if config.steps}
    lines = [{**surroundings(None), **_line(config, number, *rates[number], waiting.get(number))} for number in rates]
    append_lines(config.output, lines)
    machine = lines[0]["machine"]
    shape = " x ".join(map(str, config.input_shape))
    print(
        f"\n{config.kind} {config.data_path}, {shape}, batches of {config.batch_size}, augmentation {config.augment}; "
        f"{machine['cpu']}, {machine['cores']} cores, one thread for each rank\n"
    )
    print(_table(lines, [latest_alike(line, earlier) for line in lines]))
    print(f"\nappended to {config.output}")
    return lines


class Samples(Dataset[tuple[Any, int]]):
    """A map-style data set over the shards, as one would write it for a DataLoader."""

    def __init__(self, dataset: ShardDataset[SampleFormat], augment: str = "none") -> None:
        self._dataset, self._augment = dataset, AUGMENTATIONS[augment]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        sample = self._dataset.sample(index)
        return self._augment(sample, 1, 0, index), int(self._dataset.labels[index])

    def collate(self, batch: list[tuple[Any, int]]) -> tuple[Tensor, Tensor]:
        return self._dataset.format.to_tensor([sample for sample, _ in batch]), torch.tensor([b for _, b in batch])


def _measure(
    config: LoadingBenchmark, dataset: ShardDataset[SampleFormat]
) -> dict[int, tuple[list[float], list[float]]]:
    """Samples a second by number of workers, ours and the DataLoader's, one of each for a round."""
    rates: dict[int, tuple[list[float], list[float]]] = {number: ([], []) for number in config.workers}
    for turn in range(config.rounds + 1):
        print(f"round {turn}/{config.rounds}", file=sys.stderr)
        for number, (ours, theirs) in rates.items():
            sides = [(ours, _our_batches), (theirs, _their_batches)]
            for side, batches in sides[:: -1 if turn % 2 else 1]:
                side.append(_rate(config, partial(batches, config, dataset, number)))
    return {number: (ours[1:], theirs[1:]) for number, (ours, theirs) in rates.items()}


def _our_batches(config: LoadingBenchmark, dataset: ShardDataset[SampleFormat], workers: int) -> Batches:
    loader = BatchLoader(
        dataset,
        seed=1,
        shuffle=True,
        augment=config.augment,
        global_batch_size=config.batch_size,
        micro_batch_size=config.batch_size,
        dp_size=1,
        dp_rank=0,
        need_images=True,
        need_labels=True,
        num_workers=workers,
    )
    with closing(loader.batches()) as batches:
        for batch in batches:
            yield batch.size


def _their_batches(config: LoadingBenchmark, dataset: ShardDataset[SampleFormat], workers: int) -> Batches:
    samples = Samples(dataset, config.augment)
    while True:
        for images, _labels in DataLoader(
            samples, config.batch_size, shuffle=True, num_workers=workers, collate_fn=samples.collate, drop_last=True
        ):
            yield len(images)


def _rate(config: LoadingBenchmark, batches: Callable[[], Batches]) -> float:
    """Samples a second after the first batch: workers have started then, and those of the turn before are gone."""
    gc.collect()
    with closing(batches()) as running:
        next(running)
        begin = time.perf_counter()
        loaded = sum(islice(running, max(1, config.samples // config.batch_size)))
        return loaded / (time.perf_counter() - begin)


def _line(
    config: LoadingBenchmark, workers: int, ours: list[float], theirs: list[float], waiting: Waiting | None
) -> dict[str, Any]:
    """The figures of a number of workers. Ratios are taken round by round."""
    flags = {name: value for name, value in asdict(config).items() if name not in ("output", "rounds", "samples")}
    return {
        "row": f"{config.kind}, {workers} workers",
        "configuration": {**flags, "workers": workers},
        "samples_per_s": summary(ours),
        "dataloader_samples_per_s": summary(theirs),
        "throughput_ratio": summary([a / b for a, b in zip(ours, theirs, strict=True)]),
        "step_ms": waiting.step_ms if waiting else None,
        "waiting_share": waiting.share if waiting else None,
    }


def _table(lines: list[dict[str, Any]], earlier: list[Any]) -> str:
    cells = [["", "samples/s", "quartiles", "DataLoader", "ratio", "training step, ms", "of it waiting", "change"]]
    for line, last in zip(lines, earlier, strict=True):
        rate = line["samples_per_s"]
        cells.append(
            [
                line["row"],
                f"{rate['median']:.0f}",
                f"{rate['q1']:.0f}..{rate['q3']:.0f}",
                f"{line['dataloader_samples_per_s']['median']:.0f}",
                f"{line['throughput_ratio']['median']:.2f}",
                "-" if line["step_ms"] is None else f"{line['step_ms']:.1f}",
                "-" if line["waiting_share"] is None else f"{line['waiting_share']:.2%}",
                f"{rate['median'] / last['samples_per_s']['median'] - 1:+.1%}" if last else "-",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    )
