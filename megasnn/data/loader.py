"""Global batches for one rank: its own micro-batches, or its share of them, read ahead by worker processes.

Nothing here depends on the layout but the choice of micro-batches, and of samples in them: the order is a function of
the position (`megasnn.data.order`), the cut of the global batch and its sizes (`megasnn.batching`), the augmentation of
the sample. A `torch.utils.data.DataLoader` reads micro-batches in order, so the number of its workers changes nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import count, tee
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from megasnn.batching import micro_batch_sizes, micro_batches_of
from megasnn.data.dataset import ShardDataset
from megasnn.data.order import Position, SampleOrder
from megasnn.data.reading import PositionDataset
from megasnn.data.workers import STEP_SECONDS, WorkerWatch, start_worker, worker_context
from megasnn.parallel.sharding import own_rows


@dataclass(frozen=True)
class MicroBatch:
    """Samples that are computed together, or this rank's share of them.

    Attributes:
        first: index of this micro-batch in the global batch.
        start: place of its first sample in the global batch.
        sample_ids: int64 `[size]`, the samples of the order, the same on every rank of a pipeline: a broken sample
            that was replaced keeps its number here.
        images: float32: images `[size, C, H, W]`, normalised, channels last in memory, or event frames
            `[size, T, 2, H, W]`.
        labels: int64 `[size]`.
        skipped: the broken samples that were replaced, as messages name them; empty on ranks that read nothing.
    """

    first: int
    start: int
    size: int
    sample_ids: torch.Tensor
    images: torch.Tensor | None
    labels: torch.Tensor | None
    skipped: tuple[str, ...] = ()


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
class Share:
    """This rank's part of every global batch.

    Attributes:
        dp_size, dp_rank: the replicas, which share the micro-batches of a global batch.
        cp_size, cp_rank: the ranks that share the samples of a micro-batch.
        images, labels: what the rank's stage takes. A rank that takes neither reads nothing.
    """

    global_batch_size: int
    micro_batch_size: int
    dp_size: int = 1
    dp_rank: int = 0
    cp_size: int = 1
    cp_rank: int = 0
    images: bool = True
    labels: bool = True

    def spans(self, samples: int) -> Iterator[tuple[int, int, int]]:
        """Yields of each of its micro-batches of a batch the index, the first sample, and the number of samples. There
        may be none: at the end of a validation pass there are too few for everybody."""
        sizes = micro_batch_sizes(samples, min(self.micro_batch_size, samples))
        for index in micro_batches_of(len(sizes), self.dp_size, self.dp_rank, may_be_none=True):
            if rows := own_rows(sizes[index], self.cp_size, self.cp_rank):
                yield index, index * sizes[0] + rows.start, len(rows)


@dataclass(frozen=True)
class LoaderOptions:
    """Order, augmentation and reading of samples.

    Attributes:
        last_batch: the samples at the end of an epoch that fill no batch: "continue" fills it up with the beginning of
            the next epoch, "drop" leaves them out (others in each epoch), "keep" makes a smaller batch.
        skip_broken: put the next sample of the epoch's order that decodes in the place of one that does not, so that
            sizes and the places of all others stay.
        num_workers: processes that read ahead, a global batch or more; with 0 a batch is read when it is asked for.
        timeout: seconds after which a worker that gives nothing ends the run.
        pin_memory: hand over images in pinned memory, from which a GPU copies them without the host waiting.
    """

    seed: int
    shuffle: bool = True
    augment: str = "none"
    last_batch: str = "continue"
    skip_broken: bool = False
    num_workers: int = 0
    timeout: float = 60.0
    pin_memory: bool = False


class BatchLoader:
    """Cuts the sequence of samples into global batches and loads this rank's share of them.

    In training the sequence is endless, shuffled by `seed` and augmented as asked. Otherwise it is one pass in file
    order, every sample once, the last batch as small as the rest is; `shuffle`, `augment` and `last_batch` are then
    without effect.

    Attributes:
        skipped: number of broken samples that were replaced on this rank in the last `batches`.
    Raises:
        ValueError: an epoch would have no batch, or the augmentation is for other samples.
    """

    def __init__(self, dataset: ShardDataset, share: Share, options: LoaderOptions, training: bool = True) -> None:
        self.dataset, self.skipped = dataset, 0
        self._share, self._options, self._training = share, options, training
        change, samples = dataset.format.augmentation(options.augment), len(dataset)
        epoch = epoch_samples(samples, share.global_batch_size, options.last_batch) if training else samples
        self._order = SampleOrder(samples, options.seed, options.shuffle and training, epoch)
        self._reads = share.images or (share.labels and options.skip_broken)
        self._reader = PositionDataset(
            dataset, self._order, change if training else None, share.images, options.skip_broken
        )
        self._sampler = UpcomingBatches()
        self._watch: WorkerWatch | None = None
        self._loader: DataLoader[Any] | None = None

    def batches(self, consumed_samples: int = 0, limit: int | None = None) -> Generator[GlobalBatch]:
        """Global batches from a position on, at most `limit` of them.

        Errors of a batch are raised when that batch is asked for, with any number of workers. Workers stay for the next
        pass, unless this one is closed before its end.

        Raises:
            BrokenSample, ValueError: as `ShardDataset.sample`; samples of a micro-batch have several shapes; not one
                sample can be decoded.
            ChildProcessError: a worker has ended, or gives nothing for too long.
        """
        plans, ahead = tee(self._plans(consumed_samples, limit))
        read = self._read(part.positions for plan in ahead for part in plan.micro_batches)
        self.skipped = 0
        try:
            for plan in plans:
                parts = [self._micro_batch(part, *next(read)) for part in plan.micro_batches]
                self.skipped += sum(len(part.skipped) for part in parts)
                yield GlobalBatch(parts, plan.size, plan.consumed_samples)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the workers, also in the middle of a micro-batch. Batches that were given stay valid."""
        if self._watch is not None:
            self._watch.end()
        self._watch = self._loader = None

    def _read(self, upcoming: Iterator[list[Position]]) -> Iterator[tuple[list[int], torch.Tensor | None]]:
        """Samples that are used in each of the upcoming micro-batches, and their images."""
        if not self._reads:
            for positions in upcoming:
                yield [position.sample for position in positions], None
            return
        self._sampler.positions = upcoming
        if self._loader is None:
            self._loader = self._start()
        for found in self._watch.iterate(self._loader) if self._watch else self._loader:
            if isinstance(found, Exception):
                raise found
            yield found

    def _start(self) -> DataLoader[Any]:
        options, workers = self._options, dict[str, Any]()
        if options.num_workers:
            self._watch = WorkerWatch(options.timeout)
            micro_batches = -(-self._share.global_batch_size // self._share.micro_batch_size)
            own = -(-micro_batches // self._share.dp_size)
            workers = {
                "num_workers": options.num_workers,
                "multiprocessing_context": worker_context(),
                "persistent_workers": True,
                "prefetch_factor": max(2, -(-own // options.num_workers)),  # the next global batch, while one computes
                "worker_init_fn": start_worker,
                "timeout": STEP_SECONDS,
            }
        return DataLoader(
            self._reader,
            batch_sampler=self._sampler,
            collate_fn=self._reader.collate,
            pin_memory=options.pin_memory,
            generator=torch.Generator(),  # otherwise torch's global one would move on by a number
            **workers,
        )

    def _plans(self, position: int, limit: int | None) -> Iterator[_BatchPlan]:
        for _ in count() if limit is None else range(limit):
            size, left = self._share.global_batch_size, len(self.dataset) - position
            if not self._training:
                size = min(size, left)
                if size <= 0:
                    return
            elif self._options.last_batch == "keep":
                size = min(size, len(self.dataset) - position % len(self.dataset))
            plans = [
                _MicroBatchPlan(index, start, self._order.positions(position + start, number))
                for index, start, number in self._share.spans(size)
            ]
            yield _BatchPlan(plans, size, position + size)
            position += size

    def _micro_batch(self, plan: _MicroBatchPlan, used: list[int], images: torch.Tensor | None) -> MicroBatch:
        """Args: used: samples that were read for the positions."""
        due = [position.sample for position in plan.positions]
        labels = torch.from_numpy(self.dataset.labels[used]) if self._share.labels else None
        replaced = [sample for sample, other in zip(due, used, strict=True) if sample != other]
        skipped = tuple(map(self.dataset.describe, replaced))
        return MicroBatch(plan.first, plan.start, len(due), torch.tensor(due), images, labels, skipped)


class UpcomingBatches:
    """Batch sampler of a DataLoader: positions of each micro-batch that is to be read.

    Attributes:
        positions: set before each pass.
    """

    positions: Iterator[list[Position]] = iter(())

    def __iter__(self) -> Iterator[list[Position]]:
        return self.positions


class _MicroBatchPlan(NamedTuple):
    first: int
    start: int
    positions: list[Position]


class _BatchPlan(NamedTuple):
    micro_batches: list[_MicroBatchPlan]
    size: int
    consumed_samples: int


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


def check_shares(samples: int, share: Share, last_batch: str) -> None:
    """Raises ValueError when some batch has fewer micro-batches than there are data parallel ranks, or a micro-batch
    fewer samples than ranks that share it."""
    full = share.global_batch_size
    sizes = {full} if last_batch != "keep" else {min(full, samples), samples % full or full}
    for size in sizes:
        each = micro_batch_sizes(size, min(share.micro_batch_size, size))
        if len(each) < share.dp_size and size < full:
            raise ValueError(
                f"--last-batch keep makes a batch of {size} samples, {len(each)} micro-batch(es), at the end of an "
                f"epoch: too few for {share.dp_size} data parallel replicas; lower --micro-batch-size, or take another "
                "--last-batch"
            )
        if each[-1] < share.cp_size:
            raise ValueError(
                f"a batch of {size} samples (--global-batch-size {full}, --last-batch {last_batch}) has a micro-batch "
                f"of {each[-1]}: too few for --context-parallel-size {share.cp_size} by samples; change "
                "--micro-batch-size, or with keep take another --last-batch"
            )
        micro_batches_of(len(each), share.dp_size, 0)
