"""A rank that sleeps through whole steps of one layout after another."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from megasnn.batching import micro_batches_of
from megasnn.engine.distributed_model import DistributedModel
from megasnn.engine.setup import build_context
from megasnn.parallel_state import ParallelState, destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline.costs import PipelineCosts
from megasnn.pipeline.order import PipelineRequest
from megasnn.pipeline.p2p import WireOptions
from megasnn.pipeline.plan import plan_pipeline
from megasnn.planner.layout import Layout
from tools.benchmark.nccl_like import nccl_like
from tools.benchmark.plans_asleep_flags import SleepingPlansBenchmark, buckets_of
from tools.benchmark.queued_device import Device
from tools.benchmark.ranks import RankTask, join_ranks, set_up_rank
from tools.benchmark.rehearsal_rank import WARM_UP, begin_together, input_of, require_all_added
from tools.benchmark.sleeping import sleeping_model


class Whole(NamedTuple):
    """Seconds of a whole step on this rank: of the stream that computes, and by the clock."""

    stream: float
    clock: float


def slowest(of_ranks: Sequence[Sequence[Whole]]) -> list[Whole]:
    """Of each step, on the rank where it takes longest."""
    return [Whole(*map(max, zip(*step, strict=True))) for step in zip(*of_ranks, strict=True)]


class LayoutsAsleep:
    """A rank in a world of `nccl_like` ranks, over links. Everything is collective over all of them."""

    def __init__(self, flags: SleepingPlansBenchmark, device: Device) -> None:
        self._flags, self._device = flags, device

    def steps(self, layout: Layout, bounds: Sequence[range]) -> list[Whole]:
        """Whole steps on a layout of as many ranks as there are."""
        with self._model(layout, bounds) as model:
            with self._device.without_computing():
                for _ in range(WARM_UP):
                    self._step(model)
            return [self._step(model) for _ in range(self._flags.steps)]

    @contextmanager
    def _model(self, layout: Layout, bounds: Sequence[range]) -> Iterator[DistributedModel]:
        flags, grid = self._flags, layout.grid
        state = initialize_model_parallel(1, grid.pipeline, weight_parallel_size=grid.weight)
        try:
            context = build_context(state, "fp32", "auto")
            layers = flags.sleeping_layers()
            described = sleeping_model(layers, self._device.compute)
            costs = PipelineCosts(tuple(each.cost() for each in layers), flags.links.cost())
            request = PipelineRequest(
                layout.schedule if grid.pipeline > 1 else "auto",
                layout.chunks,
                None,
                tuple(bounds),
                1,
                self._counts(state),
                recompute=layout.recompute,
                rows_have_owners=layout.shards_optimizer,
            )
            plan = plan_pipeline(described, request, context, state, WireOptions(), costs)
            with buckets_of(round(1e3 * flags.bucket_kb)):
                yield DistributedModel(
                    described,
                    state,
                    context,
                    plan.bounds,
                    plan.schedules,
                    rows_have_owners=layout.shards_optimizer,
                )
        finally:
            destroy_model_parallel()
            self._device.end_queues()

    def _counts(self, state: ParallelState) -> tuple[int, ...]:
        """The numbers of micro-batches that replicas have, the largest first."""
        replicas, count = state.data.size, self._flags.micro_batches
        return tuple(dict.fromkeys(len(micro_batches_of(count, replicas, each)) for each in range(replicas)))

    def _step(self, model: DistributedModel) -> Whole:
        """From the first forward until the rows of all owners are here."""
        data, count = model.state.data, self._flags.micro_batches
        micro_batches = [input_of(model)] * len(micro_batches_of(count, data.size, data.rank))
        begin = begin_together(self._device)
        model.forward_backward(micro_batches, count)
        self._device.compute(self._flags.update * sum(entry.tensor.nbytes for entry in model.owned))
        model.share_rows()
        end = time.perf_counter()
        self._device.synchronize()
        require_all_added(model, count)
        return Whole(self._device.reached - begin, end - begin)


class PlansAsleepRank(LayoutsAsleep):
    """In a process of its own."""

    def __init__(self, task: RankTask[SleepingPlansBenchmark]) -> None:
        set_up_rank(task)
        join_ranks(task.store, task.rank, task.ranks)
        self._entered = ExitStack()
        super().__init__(task.work, self._entered.enter_context(nccl_like(task.work.timeout, task.work.links)))
