"""Global batches for one rank, read ahead by worker processes.

The layout only decides which samples a rank reads. Order (`megasnn.data.order`), micro-batches (`megasnn.common.grid`)
and augmentation do not depend on it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, repeat, tee
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megasnn.augment import SampleKey
from megasnn.common.grid import micro_batch_sizes, micro_batches_of
from megasnn.config.data import DataConfig
from megasnn.data.order import SampleOrder, Span
from megasnn.data.samples import BrokenSample, SampleSource
from megasnn.data.workers import STEP_SECONDS, WorkerWatch, start_worker
from megasnn.parallel.sharding import own_span

LoadedMicroBatch = tuple[Tensor | dict[str, Tensor] | None, dict[int, int]]
"""A micro-batch's images or named arrays, and substitutes for broken samples by position."""


@dataclass(frozen=True)
class MicroBatch:
    """Samples computed together, or this rank's share.

    Attributes:
        start: position of the first sample in the global batch.
        sample_ids: int64 `[size]`, equal on all ranks of a pipeline: a replaced sample keeps its number.
        inputs: float32 `[size, C, H, W]`, channels last; event frames `[size, T, 2, H, W]`; or named inputs.
        targets: classes `[size]`, or other targets.
        skipped: broken samples replaced on this rank.
        left_out: positions excluded from an evaluation.
    """

    start: int
    size: int
    sample_ids: torch.Tensor
    inputs: torch.Tensor | Mapping[str, torch.Tensor] | None
    targets: torch.Tensor | None
    skipped: int = 0
    left_out: frozenset[int] = frozenset()


@dataclass(frozen=True)
class RankBatch:
    """This rank's part of a global batch of `size` samples; `consumed_samples` is the position after it."""

    micro_batches: list[MicroBatch]
    size: int
    consumed_samples: int


@dataclass(frozen=True)
class BatchShare:
    """This rank's part of every global batch.

    Attributes:
        dp_size, dp_rank: replicas share the micro-batches.
        cp_size, cp_rank: ranks share each micro-batch's samples.
        inputs, targets: whether the rank's stage uses them; a rank without either reads nothing.
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
        """Yields first sample and size for each micro-batch here; perhaps none in a small last batch."""
        # An evaluation's last batch may be smaller than a micro-batch.
        sizes = micro_batch_sizes(samples, min(self.micro_batch_size, samples))
        for index in micro_batches_of(len(sizes), self.dp_size, self.dp_rank):
            if span := own_span(sizes[index], [self.cp_size], self.cp_rank):
                yield index * sizes[0] + span.start, len(span)


class UpcomingMicroBatch(NamedTuple):
    """A micro-batch before it is read."""

    start: int
    spans: list[Span]


class UpcomingBatch(NamedTuple):
    """This rank's part of a global batch, before it is read."""

    micro_batches: list[UpcomingMicroBatch]
    size: int
    consumed_samples: int


class BatchLoader:
    """Cuts the sequence of samples into global batches and loads this rank's share.

    Training: an endless sequence, shuffled by `seed` and augmented. Evaluation: one pass in file order; the last batch
    may be smaller.

    Args:
        pin_memory: return inputs in pinned memory, for copies to a GPU without waiting.
        timeout: seconds without data from any worker that end the run.
    Attributes:
        skipped: broken samples this rank replaced in the last `batches`.
    Raises:
        ValueError: an epoch has no full batch.
    """

    def __init__(
        self,
        dataset: SampleSource,
        share: BatchShare,
        config: DataConfig,
        seed: int,
        training: bool = True,
        pin_memory: bool = False,
        timeout: float = 60.0,
    ) -> None:
        self.dataset = dataset
        self.skipped = 0
        self._share = share
        self._workers = config.num_workers
        self._training = training
        self._pin_memory = pin_memory
        self._timeout = timeout
        samples = len(dataset)
        epoch = samples
        if training:
            epoch = epoch_samples(samples, share.global_batch_size, config.last_batch)
        self._order = SampleOrder(samples, seed, config.shuffle and training, epoch)
        self._format = dataset.format
        reads_target = share.targets and bool(self._format.target)
        # Classes of shards come from the index. But only reading finds broken samples, whose substitutes have other
        # classes.
        self._reads = share.inputs or reads_target or (share.targets and config.skip_broken_samples)
        augments = training and (share.inputs or reads_target)
        self._reader = SpanDataset(dataset, self._order, augments, config.skip_broken_samples)
        self._sampler = SpanSampler()
        self._watch: WorkerWatch | None = None
        self._loader: DataLoader[Any] | None = None

    def batches(self, consumed_samples: int = 0, limit: int | None = None) -> Generator[RankBatch]:
        """Yields at most `limit` global batches from a position on. Raises a batch's errors when it is due.

        Raises:
            BrokenSample, ValueError: as `SampleSource.sample`, or no sample is sound.
            ChildProcessError: a worker ended, or all were silent.
        """
        upcoming = self._upcoming(consumed_samples, limit)
        loaded: Iterator[LoadedMicroBatch] = repeat((None, {}))
        if self._reads:
            # Workers read ahead of the batch that is due, from a copy of the same sequence.
            ahead, upcoming = tee(upcoming)
            self._sampler.upcoming = (each.spans for batch in ahead for each in batch.micro_batches)
            loaded = self._read()
        self.skipped = 0
        try:
            for batch in upcoming:
                micro_batches = []
                for each in batch.micro_batches:
                    inputs, substitutes = next(loaded)
                    micro_batches.append(self._micro_batch(each, inputs, substitutes))
                    self.skipped += len(substitutes)
                yield RankBatch(micro_batches, batch.size, batch.consumed_samples)
        except BaseException:
            # Also GeneratorExit: workers of an unfinished pass hold its samples. After a whole pass they stay.
            self.close()
            raise

    def close(self) -> None:
        """Ends the workers; returned batches stay valid."""
        if self._watch is not None:
            self._watch.end()
        self._watch = None
        self._loader = None

    def _upcoming(self, position: int, limit: int | None) -> Iterator[UpcomingBatch]:
        numbers = count() if limit is None else range(limit)
        for _ in numbers:
            size = self._share.global_batch_size
            if not self._training:
                size = min(size, len(self.dataset) - position)
            if size <= 0:
                return
            # The order counts positions from the start of training, a share from the start of the batch.
            micro_batches = []
            for start, number in self._share.spans(size):
                spans = self._order.spans(position + start, number)
                micro_batches.append(UpcomingMicroBatch(start, spans))
            position += size
            yield UpcomingBatch(micro_batches, size, position)

    def _micro_batch(
        self,
        upcoming: UpcomingMicroBatch,
        inputs: torch.Tensor | dict[str, torch.Tensor] | None,
        substitutes: dict[int, int],
    ) -> MicroBatch:
        sample_ids = np.concatenate([span.samples for span in upcoming.spans])
        targets = None
        labels = self.dataset.labels
        if self._share.targets and labels is not None:
            used = sample_ids.copy()
            for position, sample in substitutes.items():
                used[position] = sample
            targets = torch.from_numpy(labels[used])
        if isinstance(inputs, dict):
            if self._share.targets and self._format.target:
                targets = inputs[self._format.target]
            inputs = {name: inputs[name] for name in self._format.inputs}
        if not self._share.inputs:
            inputs = None
        # Training counts a substitute in place of its broken sample; an evaluation leaves both out.
        left_out = frozenset[int]() if self._training else frozenset(substitutes)
        return MicroBatch(
            upcoming.start,
            len(sample_ids),
            torch.from_numpy(sample_ids),
            inputs,
            targets,
            skipped=len(substitutes),
            left_out=left_out,
        )

    def _read(self) -> Iterator[LoadedMicroBatch]:
        if self._loader is None:
            self._loader = self._start()
        items: Iterable[Any] = self._loader
        if self._watch is not None:
            items = self._watch.iterate(self._loader)
        for loaded in items:
            if isinstance(loaded, Exception):
                raise loaded
            yield loaded

    def _start(self) -> DataLoader[Any]:
        workers = dict[str, Any]()
        if self._workers:
            self._watch = WorkerWatch(self._timeout)
            micro_batches = -(-self._share.global_batch_size // self._share.micro_batch_size)
            # The whole next global batch is read while one computes.
            ahead = -(-micro_batches // self._share.dp_size)
            workers = {
                "num_workers": self._workers,
                # A fork of the rank itself would copy locks that its threads hold, and a GPU's context.
                "multiprocessing_context": "forkserver",
                "persistent_workers": True,
                "prefetch_factor": max(2, -(-ahead // self._workers)),
                "worker_init_fn": start_worker,
                "timeout": min(STEP_SECONDS, self._timeout),
            }
        return DataLoader(
            self._reader,
            sampler=self._sampler,
            batch_size=None,
            pin_memory=self._pin_memory,
            # Without one, a DataLoader draws from torch's global generator, and weights or dropout would change.
            generator=torch.Generator(),
            **workers,
        )


class SpanSampler:
    """A DataLoader's sampler: spans for each micro-batch. `upcoming` is set before each pass."""

    upcoming: Iterator[list[Span]] = iter(())

    def __iter__(self) -> Iterator[list[Span]]:
        return self.upcoming


def epoch_samples(samples: int, global_batch_size: int, last_batch: str) -> int:
    """Number of samples an epoch trains on. Raises ValueError if --last-batch drop leaves none."""
    if last_batch != "drop":
        return samples
    if samples < global_batch_size:
        raise ValueError(
            f"--last-batch drop leaves none of the {samples} training samples, since --global-batch-size is "
            f"{global_batch_size}; lower it to {samples} or less, or use --last-batch continue"
        )
    return samples - samples % global_batch_size


def order_identity(dataset: SampleSource, global_batch_size: int, last_batch: str) -> str:
    """Identifies a sample order, without seed and shuffling. Raises ValueError as `epoch_samples`."""
    epoch = epoch_samples(len(dataset), global_batch_size, last_batch)
    identity = dataset.fingerprint()
    if epoch < len(dataset):
        identity += f" in epochs of {epoch}"
    return identity


class SpanDataset(Dataset[LoadedMicroBatch | Exception]):
    """Map-style data set: a micro-batch's spans -> joined samples, or an error in the data.

    Args:
        augments: change samples by their keys.
        skip_broken: replace a broken sample by the next sound one in the epoch.
    """

    def __init__(self, dataset: SampleSource, order: SampleOrder, augments: bool, skip_broken: bool) -> None:
        self._dataset = dataset
        self._order = order
        self._augments = augments
        self._skip_broken = skip_broken

    def __getitem__(self, spans: list[Span]) -> LoadedMicroBatch | Exception:
        images: list[Any] = []
        substitutes: dict[int, int] = {}
        try:
            for epoch, first, samples in spans:
                for position, sample in enumerate(samples.tolist(), first):
                    # Neither rank nor position is in the key, so that every layout changes a sample alike.
                    key = (self._order.seed, epoch, sample) if self._augments else None
                    try:
                        image = self._dataset.sample(sample, key)
                    except BrokenSample:
                        if not self._skip_broken:
                            raise
                        substitute, image = self._substitute(epoch, position, key)
                        substitutes[len(images)] = substitute
                    images.append(image)
            joined = self._dataset.format.batch(images)
        except (ValueError, OSError) as error:
            # A DataLoader would raise it anew with a whole traceback as its message.
            return error
        if isinstance(joined, dict):
            return {name: torch.from_numpy(each) for name, each in joined.items()}, substitutes
        return torch.from_numpy(joined), substitutes

    def _substitute(self, epoch: int, position: int, key: SampleKey | None) -> tuple[int, Any]:
        """The next sound sample and its value, augmented by the broken sample's key."""
        for sample in self._order.substitutes(epoch, position):
            with suppress(BrokenSample):
                return sample, self._dataset.sample(sample, key)
        raise ValueError(f"none of the {len(self._dataset)} samples can be decoded")
