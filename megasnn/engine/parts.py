"""Parts of a model that a rank executes by its schedule, and outputs of windows of time steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from megasnn.bundle import Bundle, bundle_of, entries_of
from megasnn.layers import BuildContext
from megasnn.parallel.fsdp import GatheredWeights
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.chunk import PipelineChunk
from megasnn.schedule import SchedulePlan, plan_schedule


class Windows:
    """Outputs for the windows of the same samples, until there are `count` of them: all time steps."""

    def __init__(self, count: int) -> None:
        self.count, self.outputs = count, list[Bundle]()

    def join(self, output: Bundle) -> Bundle | None:
        """Returns the output for all time steps with the last window of the samples, None before."""
        self.outputs.append(output)
        if len(self.outputs) < self.count:
            return None
        windows = [entries_of(each) for each in self.outputs]
        self.outputs.clear()
        if self.count == 1:
            return output
        joined: Bundle = bundle_of({key: torch.cat([each[key] for each in windows]) for key in windows[0]})
        return joined


def plan_chunks(schedule: str | SchedulePlan, stages: int, chunks: int) -> SchedulePlan:
    """Raises ValueError for a number of chunks that the schedule does not have."""
    plan = schedule if isinstance(schedule, SchedulePlan) else plan_schedule(schedule, stages, chunks // stages)
    if len(plan.placement) != chunks or plan.stages != stages:
        raise ValueError(
            f"--pipeline-schedule {plan.name} has {len(plan.placement)} chunks on {plan.stages} pipeline rank(s), "
            f"the model is cut into {chunks} for {stages}"
        )
    return plan


def gathered_weights(plan: SchedulePlan, state: ParallelState, context: BuildContext) -> GatheredWeights | None:
    """Weights that replicas keep by rows; None where each keeps all.

    Raises:
        ValueError: the schedule gathers nothing, or the context does not know of it.
    """
    if state.dp_shard.size == 1:
        return None
    if plan.weights is None or context.dp_shard.size != state.dp_shard.size:
        raise ValueError(
            f"weights are shared by {state.dp_shard.size} ranks: give a schedule that gathers them "
            "(SchedulePlan.sharing), and BuildContext(dp_shard=...)"
        )
    return GatheredWeights(state.dp_shard, state.dp_shard_grad, context.cast_weights.give)


def scatters(plan: SchedulePlan) -> bool:
    """True where gradients are scattered after every micro-batch."""
    return plan.weights is not None and bool(plan.weights.scattered)


def executed_parts(
    plan: SchedulePlan, chunks: dict[int, PipelineChunk], units: Sequence[range]
) -> tuple[dict[int, PipelineChunk], dict[int, PipelineChunk]]:
    """This rank's chunks, or their units, by the numbers that the plan's actions have.

    Returns:
        the parts that are executed, and those whose gradients are reduced at once: each unit where gradients are
        scattered after every micro-batch, else each chunk, whose gradients are complete when its first unit's are.
    """
    first, executed = [0, *accumulate(plan.units_of_chunks)], chunks
    if plan.units is not None:
        executed = {
            unit: chunk.part(units, unit)
            for index, chunk in chunks.items()
            for unit in range(first[index], first[index + 1])
        }
    return executed, executed if scatters(plan) else {first[index]: chunk for index, chunk in chunks.items()}
