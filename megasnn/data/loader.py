"""Global batches for one rank: its own micro-batches, or its share of them, read ahead by worker processes.

Nothing here depends on the layout but the choice of micro-batches, and of samples in them: the order is a function of
the position (`megasnn.data.order`), the cut of the global batch follows its sizes (`megasnn.common.grid`), and the
augmentation the sample. A `torch.utils.data.DataLoader` reads micro-batches in order, so the number of its workers
changes nothing.

Samples are decoded, augmented, replaced where they are broken, and joined to micro-batches. An evaluation counts no
sample that stands in for a broken one.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, repeat, tee
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megasnn.augment import SampleKey
from megasnn.common.grid import micro_batch_sizes, micro_batches_of
from megasnn.config.data import DataConfig
from megasnn.data.arrays import ArrayFormat
from megasnn.data.datasets import BrokenSample, ShardDataset
from megasnn.data.order import SampleOrder, Span
from megasnn.data.workers import STEP_SECONDS, WorkerWatch, start_worker
from megasnn.parallel.sharding import own_span

LoadedMicroBatch = tuple[Tensor | dict[str, Tensor] | None, dict[int, int]]
"""Images of a micro-batch, or arrays by name, and of each that stands in for a broken one its place and sample."""


@dataclass(frozen=True)
class MicroBatch:
    """Samples that are computed together, or this rank's share of them.

    Attributes:
        start: place of its first sample in the global batch.
        sample_ids: int64 `[size]`, the samples of the order, the same on every rank of a pipeline: a broken sample
            that was replaced keeps its number here.
        inputs: float32 `[size, C, H, W]`, channels last in memory, or event frames `[size, T, 2, H, W]`; or inputs by
            name.
        targets: classes `[size]`, or other targets.
        skipped: number of broken samples that were replaced; 0 on ranks that read nothing.
        left_out: places in this micro-batch of samples that an evaluation does not count.
    """

    start: int
    size: int
    sample_ids: torch.Tensor
    inputs: torch.Tensor | Mapping[str, torch.Tensor] | None
    targets: torch.Tensor | None
    skipped: int = 0
    left_out: frozenset[int] = frozenset()


@dataclass(frozen=True)
class GlobalBatch:
    """This rank's micro-batches of a global batch of `size` samples.

    It may have none, or fewer than others: on the last batch of a validation pass, when that has fewer micro-batches
    than there are data parallel ranks, or one of them fewer samples than there are ranks to share it.

    Attributes:
        consumed_samples: the position after this batch.
    """

    micro_batches: list[MicroBatch]
    size: int
    consumed_samples: int


@dataclass(frozen=True)
class BatchShare:
    """This rank's part of every global batch.

    Attributes:
        dp_size, dp_rank: the replicas, which share the micro-batches of a global batch.
        cp_size, cp_rank: the ranks that share the samples of a micro-batch.
        inputs, targets: what the rank's stage takes. A rank that takes neither reads nothing.
    """

    global_batch_size: int
    micro_batch_size: int
    dp_size: int = 1
    dp_rank: int = 0
    cp_size: int = 1
    cp_rank: int = 0
    inputs: bool = True
    targets: bool = True

    def spans(self, samples: int) -> Iterator[tuple[int, int]]:
        """Yields the first sample, and the number of samples, of each of its micro-batches of a batch. There may be
        none: at the end of a validation pass there are too few for everybody."""
        sizes = micro_batch_sizes(samples, min(self.micro_batch_size, samples))
        for index in micro_batches_of(len(sizes), self.dp_size, self.dp_rank):
            if span := own_span(sizes[index], [self.cp_size], self.cp_rank):
                yield index * sizes[0] + span.start, len(span)


class BatchLoader:
    """Cuts the sequence of samples into global batches and loads this rank's share of them.

    In training the sequence is endless, shuffled by `seed` and augmented. Otherwise it is one pass in file order, every
    sample once, the last batch as small as the rest is; `shuffle` and `last_batch` are then without effect.

    Args:
        config: `last_batch`: "continue" fills the last batch of an epoch with the beginning of the next one, "drop"
            leaves its samples out (others in each epoch). `skip_broken_samples`: the next sample of the epoch's order
            that decodes takes the place of one that does not, so that sizes and the places of all others stay.
        pin_memory: hand over inputs in pinned memory, from which a GPU copies them without the host waiting.
        timeout: seconds after which workers that give nothing end the run.
    Attributes:
        skipped: number of broken samples that were replaced on this rank in the last `batches`.
    Raises:
        ValueError: an epoch would have no batch.
    """

    def __init__(
        self,
        dataset: ShardDataset,
        share: BatchShare,
        config: DataConfig,
        seed: int,
        training: bool = True,
        pin_memory: bool = False,
        timeout: float = 60.0,
    ) -> None:
        self.dataset, self.skipped = dataset, 0
        self._share, self._workers, self._training = share, config.num_workers, training
        self._pin_memory, self._timeout, samples = pin_memory, timeout, len(dataset)
        epoch = epoch_samples(samples, share.global_batch_size, config.last_batch) if training else samples
        self._order = SampleOrder(samples, seed, config.shuffle and training, epoch)
        self._format = format = dataset.format if isinstance(dataset.format, ArrayFormat) else None
        of_target = format is not None and format.target
        self._reads = share.inputs or (share.targets and bool(config.skip_broken_samples or of_target))
        augments = training and share.inputs
        self._reader = SpanDataset(dataset, self._order, augments, config.skip_broken_samples)
        self._sampler = UpcomingBatches()
        self._watch: WorkerWatch | None = None
        self._loader: DataLoader[Any] | None = None

    def batches(self, consumed_samples: int = 0, limit: int | None = None) -> Generator[GlobalBatch]:
        """Global batches from a position on, at most `limit` of them.

        Errors of a batch are raised when that batch is asked for, with any number of workers. Workers stay for the next
        pass, unless this one is closed before its end.

        Raises:
            BrokenSample, ValueError: as `ShardDataset.sample`; not one sample can be decoded.
            ChildProcessError: a worker has ended, or gives nothing for too long.
        """
        due = self._plans(consumed_samples, limit)
        read: Iterator[LoadedMicroBatch] = repeat((None, {}))
        if self._reads:
            ahead, due = tee(due)
            self._sampler.upcoming = (spans for _, _, parts in ahead for _, spans in parts)
            read = self._read()
        self.skipped = 0
        try:
            for size, position, parts in due:
                micro_batches = [self._micro_batch(start, spans, *next(read)) for start, spans in parts]
                self.skipped += sum(each.skipped for each in micro_batches)
                yield GlobalBatch(micro_batches, size, position)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the workers, also in the middle of a micro-batch. Batches that were given stay valid."""
        if self._watch is not None:
            self._watch.end()
        self._watch = self._loader = None

    def _plans(self, position: int, limit: int | None) -> Iterator[tuple[int, int, list[tuple[int, list[Span]]]]]:
        """Yields of each global batch the size, the position after it, and the start and spans of micro-batches."""
        for _ in count() if limit is None else range(limit):
            size = self._share.global_batch_size
            if not self._training:
                size = min(size, len(self.dataset) - position)
            if size <= 0:
                return
            own = self._share.spans(size)
            yield size, position + size, [(start, self._order.spans(position + start, number)) for start, number in own]
            position += size

    def _micro_batch(
        self,
        start: int,
        spans: list[Span],
        inputs: torch.Tensor | dict[str, torch.Tensor] | None,
        replaced: dict[int, int],
    ) -> MicroBatch:
        due = np.concatenate([span.samples for span in spans])
        used = due.copy()
        for position, sample in replaced.items():
            used[position] = sample
        targets = torch.from_numpy(self.dataset.labels[used]) if self._share.targets else None
        if isinstance(inputs, dict) and self._format is not None:
            targets = inputs[self._format.target] if self._share.targets and self._format.target else targets
            inputs = {name: inputs[name] for name in self._format.inputs}
        inputs = inputs if self._share.inputs else None
        left_out = frozenset() if self._training else frozenset(replaced)
        return MicroBatch(start, len(due), torch.from_numpy(due), inputs, targets, len(replaced), left_out)

    def _read(self) -> Iterator[LoadedMicroBatch]:
        """Inputs of each of the upcoming micro-batches."""
        if self._loader is None:
            self._loader = self._start()
        for found in self._watch.iterate(self._loader) if self._watch else self._loader:
            if isinstance(found, Exception):
                raise found
            yield found

    def _start(self) -> DataLoader[Any]:
        workers = dict[str, Any]()
        if self._workers:
            self._watch = WorkerWatch(self._timeout)
            micro_batches = -(-self._share.global_batch_size // self._share.micro_batch_size)
            own = -(-micro_batches // self._share.dp_size)
            workers = {
                "num_workers": self._workers,
                "multiprocessing_context": "forkserver",
                "persistent_workers": True,
                "prefetch_factor": max(2, -(-own // self._workers)),  # the next global batch, while one computes
                "worker_init_fn": start_worker,
                "timeout": min(STEP_SECONDS, self._timeout),
            }
        return DataLoader(
            self._reader,
            sampler=self._sampler,
            batch_size=None,
            pin_memory=self._pin_memory,
            generator=torch.Generator(),  # otherwise torch's global one would move on by a number
            **workers,
        )


class UpcomingBatches:
    """Sampler of a DataLoader: spans of each micro-batch that is to be read.

    Attributes:
        upcoming: set before each pass.
    """

    upcoming: Iterator[list[Span]] = iter(())

    def __iter__(self) -> Iterator[list[Span]]:
        return self.upcoming


def epoch_samples(samples: int, global_batch_size: int, last_batch: str) -> int:
    """Number of samples that an epoch trains on.

    Raises:
        ValueError: none, since not one batch is full and the last one is dropped.
    """
    if last_batch != "drop":
        return samples
    if samples < global_batch_size:
        raise ValueError(
            f"--last-batch drop leaves nothing of {samples} training samples: --global-batch-size is "
            f"{global_batch_size}; lower it, or take another --last-batch"
        )
    return samples - samples % global_batch_size


def order_identity(dataset: ShardDataset, global_batch_size: int, last_batch: str) -> str:
    """Identity of an order of samples, beside seed and shuffling: equal where a position means the same.

    Raises:
        ValueError: as `epoch_samples`.
    """
    epoch = epoch_samples(len(dataset), global_batch_size, last_batch)
    return dataset.fingerprint() + (f" in epochs of {epoch}" if epoch < len(dataset) else "")


class SpanDataset(Dataset[LoadedMicroBatch | Exception]):
    """Map-style data set for a DataLoader, from the spans of a micro-batch to its images.

    Errors of the data are returned as exceptions: a DataLoader would raise them with a traceback for their text.

    Args:
        augments: changes samples by the keys of their positions.
        skip_broken: replaces a sample that cannot be decoded by the next one of the epoch's order.
    """

    def __init__(self, dataset: ShardDataset, order: SampleOrder, augments: bool, skip_broken: bool) -> None:
        self._dataset, self._order = dataset, order
        self._augments, self._skip_broken = augments, skip_broken

    def __getitem__(self, spans: list[Span]) -> LoadedMicroBatch | Exception:
        images: list[Any] = []
        replaced: dict[int, int] = {}
        try:
            for epoch, first, samples in spans:
                for position, sample in enumerate(samples.tolist(), first):
                    key = (self._order.seed, epoch, sample) if self._augments else None
                    try:
                        image = self._dataset.sample(sample, key)
                    except BrokenSample:
                        if not self._skip_broken:
                            raise
                        replaced[len(images)], image = self._substitute(epoch, position, key)
                    images.append(image)
            joined = self._dataset.format.batch(images)
            if isinstance(joined, dict):
                return {name: torch.from_numpy(each) for name, each in joined.items()}, replaced
            return torch.from_numpy(joined), replaced
        except (ValueError, OSError) as error:
            return error

    def _substitute(self, epoch: int, position: int, key: SampleKey | None) -> tuple[int, Any]:
        """The next sample that can be decoded, which is augmented by the key of the place that it takes."""
        for sample in self._order.substitutes(epoch, position):
            with suppress(BrokenSample):
                return sample, self._dataset.sample(sample, key)
        raise ValueError(f"none of the {len(self._dataset)} samples can be decoded")
