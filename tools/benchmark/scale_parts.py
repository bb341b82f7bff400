"""What one rank of many does before the first step, and what a large schedule takes, without the other ranks."""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megasnn.bundle import logits_of
from megasnn.checkpoint.planner import content_of, pieces_of, plan_reading
from megasnn.checkpoint.saving import written_here
from megasnn.comm.codec import Content
from megasnn.grid import Grid, Place
from megasnn.layers.context import BuildContext
from megasnn.models.building import built
from megasnn.models.spikformer.dimensions import Spikformer
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline.chunk import build_chunk
from megasnn.pipeline.executor import PipelineExecutor
from megasnn.pipeline.step_state import MicroBatchInput
from megasnn.schedule import generate, simulate, validate
from megasnn.schedule.memory import UnitMemory, moments
from megasnn.schedule.named import complete, equal_costs, named_schedule
from megasnn.schedule.refine import refine
from megasnn.sharded_tensors import ShardedTensor, sharded_tensors
from megasnn.telemetry.memory import held_memory_mb
from tools.benchmark.harness import Figures
from tools.benchmark.sleeping import SleepingLayer, sleeping_model

CPU = torch.device("cpu")
MOMENTS = "exp_avg", "exp_avg_sq"
HELD = UnitMemory(8, 1, {}, 1.0, output=2, message=1, gradient=2)


class Watch:
    """Seconds from one reading to the next."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def read(self) -> float:
        last, self._last = self._last, time.perf_counter()
        return self._last - last


def make_groups(grid: Grid) -> Figures:
    """Seconds and MB of making a grid's groups on its last rank, in a world that is only pretended."""
    if grid.world_size == 1:
        return {"group_calls": 0, "groups_s": 0.0, "groups_mb": 0.0, "communicators": 0}
    dist.init_process_group("fake", store=FakeStore(), rank=grid.world_size - 1, world_size=grid.world_size)
    gc.collect()
    try:
        with mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
            before, watch = held_memory_mb(CPU), Watch()
            state = initialize_model_parallel(grid.tensor, grid.pipeline, CPU, grid.weight, grid.context)
            seconds = watch.read()
        figures = {"group_calls": made.call_count, "groups_s": seconds, "groups_mb": held_memory_mb(CPU) - before}
        return {**figures, "communicators": len(state.communicators.names)}
    finally:
        destroy_model_parallel()
        dist.destroy_process_group()


class Checkpointed:
    """The tensors of a Spikformer with a block or more for each stage, as all ranks of a grid have them, on meta.

    Args:
        rows_have_owners: whether replicas share out the optimizer's state (--use-distributed-optimizer).
    """

    def __init__(self, grid: Grid, depth: int, rows_have_owners: bool) -> None:
        self._grid, self._rows_have_owners = grid, rows_have_owners
        layers = built(Spikformer(embed_dim=512, depth=depth, num_heads=8, patch_size=4, image_size=32))
        self._layers = [list(sharded_tensors([(each.name, each.module)])) for each in layers]

    def of_rank(self, rank: int) -> list[ShardedTensor]:
        """All that a rank saves: of each parameter the optimizer's state, too."""
        there, stages, count = self._grid.coordinates(rank), self._grid.pipeline, len(self._layers)
        place = Place(replace(self._grid, pipeline=1), replace(there, pipeline=0))
        mine = self._layers[count * there.pipeline // stages : count * (there.pipeline + 1) // stages]
        return [found for layer in mine for entry in layer for found in self._placed(entry, place)]

    def _placed(self, entry: ShardedTensor, place: Place) -> Iterator[ShardedTensor]:
        shard = replace(entry.shard, place=place)
        yield replace(entry, shard=shard)  # of the tensor only its type is looked at
        if entry.is_parameter:
            owned = shard.by_rows("data") if self._rows_have_owners else shard
            yield from (ShardedTensor(f"optimizer.{kind}.{entry.name}", entry.tensor, owned, False) for kind in MOMENTS)

    def measure(self) -> Figures:
        """Seconds to describe what a rank holds, to join what all ranks write, and to find what a rank reads."""
        last, watch = self._grid.world_size - 1, Watch()
        mine = self.of_rank(last)
        figures: Figures = {"describe_s": watch.read()}
        told = []
        for rank in range(self._grid.world_size):
            entries = self.of_rank(rank)
            told.append(pickle.dumps(([each.name for each in entries], pieces_of(written_here(entries), rank))))
        figures |= {"told_mb": sum(map(len, told)) / 1e6, "all_ranks_s": watch.read()}
        ranks = list(map(pickle.loads, told))
        content = content_of([held for _, held in ranks], {name for names, _ in ranks for name in names})
        figures |= {"join_s": watch.read(), "pieces": sum(len(each.pieces) for each in content.tensors)}
        saved, held = {each.name: each for each in content.tensors}, list(map(_with_memory, mine))
        watch.read()
        read = plan_reading(held, saved)
        return figures | {"reading_s": watch.read(), "slices": len(read)}


def _with_memory(entry: ShardedTensor) -> ShardedTensor:
    return replace(entry, tensor=torch.empty(entry.shard.local_shape, dtype=entry.tensor.dtype, device="meta"))


def measure_schedule(name: str, stages: int, micro_batches: int, units: int) -> Figures:
    """Seconds of each step from a name to a timeline, and to what each rank holds.

    Args:
        units: of each chunk; 1: the chunks as they are.
    """
    watch, costs_of = Watch(), equal_costs(stages)
    schedule = named_schedule(name, stages, micro_batches, None, costs_of)
    figures: Figures = {"order_s": watch.read()}
    schedule = complete(schedule)
    figures["transfers_s"] = watch.read()
    schedule = refine(schedule, [units] * schedule.chunks)
    figures["units_s"] = watch.read()
    validate(schedule)
    figures["validate_s"] = watch.read()
    simulate(schedule, costs_of(schedule.placement))
    figures["simulate_s"] = watch.read()
    figures["total_s"] = sum(figures.values())
    for rank in range(stages):
        for _ in moments(schedule, rank, [HELD] * schedule.chunks):
            pass
    figures["memory_s"] = watch.read()
    return {**figures, "actions": sum(map(len, schedule.actions))}


def measure_executor(micro_batches: int, units: int) -> Figures:
    """Actions in a second that the executor's loop does on one rank with layers that compute next to nothing."""
    state = initialize_model_parallel()
    try:
        model = sleeping_model([SleepingLayer(0, 0, 0, 0, 4, Content.DENSE, 4)] * units, lambda seconds: None)
        bounds: Sequence[range] = [range(each, each + 1) for each in range(units)]
        chunks = {each: build_chunk(model, bounds, each, BuildContext(), CPU, 0) for each in range(units)}
        executor = PipelineExecutor(chunks, (0,) * units, state, lambda logits, labels: logits_of(logits).sum())
        schedule = refine(generate("zb1p", 1, micro_batches), [units])
        inputs = [MicroBatchInput(torch.zeros(1, 1, 1, 1), torch.zeros(1, dtype=torch.long), 1)] * micro_batches
        executor.train_step(schedule, inputs)  # gradients get their memory
        watch = Watch()
        executor.train_step(schedule, inputs)
        seconds, actions = watch.read(), len(schedule.actions[0])
        return {"actions": actions, "seconds": seconds, "per_second": actions / seconds}
    finally:
        destroy_model_parallel()
