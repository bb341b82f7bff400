"""Global batches for one rank: its own micro-batches, or its share of them, read ahead by other processes.

Nothing here depends on the layout but the choice of micro-batches, and of samples in them: the order is a function of
the position (`megasnn.data.order`), the cut of the global batch and its sizes (`megasnn.batching`), the augmentation of
the sample. Workers fill whole micro-batches, and batches leave in order, so that their number cannot change
anything either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice

import numpy as np
import torch
from numpy.typing import NDArray

from megasnn.batching import first_sample, micro_batch_sizes, micro_batches_of
from megasnn.data.dataset import ShardDataset
from megasnn.data.epochs import epoch_samples
from megasnn.data.feed import Feed
from megasnn.data.formats import SampleFormat
from megasnn.data.order import SampleOrder, Stretch
from megasnn.data.reading import SlotReader
from megasnn.data.remote.ahead import ShardsAhead
from megasnn.data.workers import AHEAD, WorkerPool
from megasnn.sharding import own_rows

_PLANNED = 16  # batches that are looked through for shards to fetch


@dataclass(frozen=True)
class MicroBatch:
    """Samples that are computed together, or this rank's share of them.

    first: index of this micro-batch in the global batch.
    start: place of its first sample in the global batch.
    sample_ids: int64 `[size]`, the samples that the order puts here. They are the same on every rank of a
        pipeline, whatever it reads: where a broken sample was replaced they still name the broken one.
    images: float32: images `[size, C, H, W]`, normalised, channels last in memory, or event frames
        `[size, T, 2, H, W]`.
    labels: int64 `[size]`.
    skipped: the broken samples that were replaced, as messages name them; empty on ranks that read nothing.
    arrived: on a GPU, the event after which images and labels are there.
    """

    first: int
    start: int
    size: int
    sample_ids: torch.Tensor
    images: torch.Tensor | None
    labels: torch.Tensor | None
    skipped: tuple[str, ...] = ()
    arrived: torch.cuda.Event | None = None


@dataclass(frozen=True)
class GlobalBatch:
    """This rank's micro-batches of a global batch of `size` samples.

    It may have none, or fewer than others: on the last batch of a validation pass, when that has fewer micro-batches
    than there are data parallel ranks, or one of them fewer samples than there are ranks to share it.
    consumed_samples: the position after this batch.
    """

    micro_batches: list[MicroBatch]
    size: int
    consumed_samples: int


class BatchLoader:
    """Cuts the sequence of samples into global batches and loads what one data parallel rank needs of them.

    In training the sequence is endless, shuffled by `seed` and augmented as asked. Otherwise it is one pass
    in file order, every sample once, the last batch as small as the rest is; `shuffle`, `augment` and
    `last_batch` are then without effect.

    cp_size, cp_rank: the ranks that share a micro-batch by samples.
    whole: read all of a micro-batch nevertheless, since its samples are to be mixed with each other.

    last_batch: what becomes of the samples at the end of an epoch that fill no batch: "continue" fills it up with the
    beginning of the next epoch, "drop" leaves them out (others in each epoch), "keep" makes a smaller batch.

    num_workers: processes that load ahead: the next global batch, and more if that does not keep all of them
    busy. With 0 a batch is loaded when it is asked for.
    skip_broken: put the next sample of the epoch's order that decodes in the place of one that does not, so
    that sizes and the places of all others stay. Ranks that need only labels decode each sample once to come
    to the same choice.
    skipped: how often that happened on this rank, counted as batches are handed out.
    pin_for: a GPU, to which images and labels are copied while the rank goes on, as soon as they are loaded.

    Raises:
        ValueError: an epoch would have no batch.
    """

    def __init__(
        self,
        dataset: ShardDataset[SampleFormat],
        *,
        seed: int,
        shuffle: bool,
        augment: str,
        global_batch_size: int,
        micro_batch_size: int,
        dp_size: int,
        dp_rank: int,
        need_images: bool,
        need_labels: bool,
        num_workers: int = 0,
        skip_broken: bool = False,
        training: bool = True,
        pin_for: torch.device | None = None,
        last_batch: str = "continue",
        cp_size: int = 1,
        cp_rank: int = 0,
        whole: bool = False,
    ) -> None:
        change = dataset.format.augmentation(augment)
        self.dataset = dataset
        self.skipped = 0
        epoch = epoch_samples(len(dataset), global_batch_size, last_batch) if training else None
        self._order = SampleOrder(len(dataset), seed, shuffle and training, epoch)
        self._keep_last = last_batch == "keep"
        self._reader = SlotReader(dataset, self._order, seed, change if training else None, need_images, skip_broken)
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._dp_size = dp_size
        self._dp_rank = dp_rank
        self._cp_size, self._cp_rank = (1, 0) if whole else (cp_size, cp_rank)
        self._need_images = need_images
        self._need_labels = need_labels
        self._reads = need_images or (need_labels and skip_broken)
        self._num_workers = num_workers if self._reads else 0
        self._training = training
        self._feed = None if pin_for is None else Feed(pin_for)

    def batches(self, consumed_samples: int = 0, limit: int | None = None) -> Generator[GlobalBatch]:
        """The global batches from a position on, at most `limit` of them.

        Close the iterator (or use it up) to end its workers. What goes wrong while a batch is loaded is
        raised when that batch is asked for, with any number of workers.
        """
        plans = self._plans(consumed_samples, limit)
        if self._reads and self.dataset.fetch_ahead:
            plans = self._with_shards_ahead(plans, self.dataset.fetch_ahead)
        loaded = self._load_ahead(plans) if self._num_workers else map(self._load_batch, plans)
        for batch in loaded:
            self.skipped += sum(len(micro_batch.skipped) for micro_batch in batch.micro_batches)
            if self._feed is not None:
                self._feed.hand_over(batch.micro_batches)
            yield batch

    def _plans(self, position: int, limit: int | None) -> Iterator[_BatchPlan]:
        made = 0
        while limit is None or made < limit:
            size = self._global_batch_size
            if not self._training:
                size = min(size, len(self.dataset) - position)
                if size <= 0:
                    return
            elif self._keep_last:
                size = min(size, len(self.dataset) - position % len(self.dataset))
            yield _BatchPlan(self._own_micro_batches(position, size), size, position + size)
            position += size
            made += 1

    def _with_shards_ahead(self, plans: Iterator[_BatchPlan], most: int) -> Iterator[_BatchPlan]:
        """The plans; shards that they need and the cache has removed are fetched again, `most` of them ahead."""
        with closing(ShardsAhead(most)) as ahead:
            coming = deque(islice(plans, _PLANNED))
            while coming:
                needed = [list(self.dataset.remote_shards(plan.samples)) for plan in coming]
                ahead.begin(list(dict.fromkeys(chain.from_iterable(needed)))[: len(needed[0]) + most])
                yield coming.popleft()
                coming.extend(islice(plans, 1))

    def _own_micro_batches(self, position: int, size: int) -> list[_MicroBatchPlan]:
        sizes = micro_batch_sizes(size, min(self._micro_batch_size, size))
        # At the end of a validation pass there may be too few for everybody.
        own = micro_batches_of(len(sizes), self._dp_size, self._dp_rank, may_be_none=True)
        shares = [own_rows(sizes[index], self._cp_size, self._cp_rank) for index in own]
        starts = [first_sample(sizes, index) + share.start for index, share in zip(own, shares, strict=True)]
        return [
            _MicroBatchPlan(index, start, self._order.stretches(position + start, len(share)))
            for index, start, share in zip(own, starts, shares, strict=True)
            if share
        ]

    def _load_batch(self, plan: _BatchPlan) -> GlobalBatch:
        return plan.batch([self._load(micro_batch) for micro_batch in plan.micro_batches])

    def _load_ahead(self, plans: Iterator[_BatchPlan]) -> Iterator[GlobalBatch]:
        """Keep one batch beyond the one handed out, and enough micro-batches for every worker, in the making."""
        waiting: deque[tuple[_BatchPlan, list[Future[MicroBatch]]]] = deque()
        with closing(WorkerPool[MicroBatch](self._reader, self._num_workers)) as pool:
            for plan in plans:
                parts = [pool.submit(part.stretches, partial(self._finish, part)) for part in plan.micro_batches]
                waiting.append((plan, parts))
                ahead = sum(len(futures) for _, futures in list(waiting)[1:])
                if len(waiting) > 1 and ahead >= AHEAD * self._num_workers:
                    yield _wait_for(*waiting.popleft())
            while waiting:
                yield _wait_for(*waiting.popleft())

    def _load(self, plan: _MicroBatchPlan) -> MicroBatch:
        if not self._reads:
            return self._finish(plan, plan.samples, None)
        return self._finish(plan, *self._reader.read(plan.stretches, lambda shape: np.empty(shape, np.float32)))

    def _finish(self, plan: _MicroBatchPlan, samples: list[int], values: NDArray[np.float32] | None) -> MicroBatch:
        """Args: samples, values: what `SlotReader.read` gave."""
        images = None if values is None else self.dataset.format.as_tensor(values)
        labels = torch.from_numpy(self.dataset.labels[samples]) if self._need_labels else None
        arrived = None
        if self._feed is not None:
            (images, labels), arrived = self._feed.begin(images, labels)
        due, skipped = plan.samples, list[str]()
        if samples != due:
            pairs = zip(due, samples, strict=True)
            skipped = [self.dataset.describe(broken) for broken, used in pairs if broken != used]
        ids = torch.from_numpy(np.array(due, np.int64))
        return MicroBatch(plan.index, plan.start, len(due), ids, images, labels, tuple(skipped), arrived)


@dataclass(frozen=True)
class _MicroBatchPlan:
    index: int
    start: int
    stretches: list[Stretch]

    @property
    def samples(self) -> list[int]:
        """Those that the order puts here."""
        return [sample for stretch in self.stretches for sample in stretch.samples]


@dataclass(frozen=True)
class _BatchPlan:
    micro_batches: list[_MicroBatchPlan]
    size: int
    consumed_samples: int

    @property
    def samples(self) -> list[int]:
        """Those that the order puts into these micro-batches."""
        return [sample for part in self.micro_batches for sample in part.samples]

    def batch(self, micro_batches: list[MicroBatch]) -> GlobalBatch:
        return GlobalBatch(micro_batches, self.size, self.consumed_samples)


def _wait_for(plan: _BatchPlan, futures: list[Future[MicroBatch]]) -> GlobalBatch:
    return plan.batch([future.result() for future in futures])
