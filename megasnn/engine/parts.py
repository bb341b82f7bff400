"""The parts of a model that a rank executes, and what gathers their weights, as its schedule has them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from megasnn.layers import BuildContext
from megasnn.parallel.fsdp import GatheredWeights
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.chunk import PipelineChunk
from megasnn.schedule import SchedulePlan, plan_schedule


def gathered_weights(plan: SchedulePlan, state: ParallelState, context: BuildContext) -> GatheredWeights | None:
    """What gathers weights that replicas keep by rows; None where they keep all.

    Raises:
        ValueError: the schedule gathers nothing, or the context does not know of it.
    """
    if state.weight.size == 1:
        return None
    if plan.weights is None or context.weight.size != state.weight.size:
        raise ValueError(
            f"weights are shared by {state.weight.size} ranks: give a schedule that gathers them "
            "(SchedulePlan.sharing), and BuildContext(weight=...)"
        )
    return GatheredWeights(state.weight, state.scatter, context.cast_weights)


def planned(schedule: str | SchedulePlan, stages: int, chunks: int) -> SchedulePlan:
    """Raises ValueError for a number of chunks that the schedule does not have."""
    plan = schedule if isinstance(schedule, SchedulePlan) else plan_schedule(schedule, stages, chunks // stages)
    if len(plan.placement) != chunks or plan.stages != stages:
        raise ValueError(
            f"--pipeline-schedule {plan.name} has {len(plan.placement)} chunks on {plan.stages} pipeline rank(s), "
            f"the model is cut into {chunks} for {stages}"
        )
    return plan


def executed_parts(
    plan: SchedulePlan, chunks: dict[int, PipelineChunk], units: Sequence[range]
) -> tuple[dict[int, PipelineChunk], dict[int, PipelineChunk]]:
    """This rank's chunks by the numbers that the plan's actions have: themselves, or their units.

    Args:
        chunks: by index. units: the layers of each unit.
    Returns:
        what is executed, and of it what data parallelism reduces the gradients of at once: each unit where gradients
        are scattered after every micro-batch, else each chunk; its gradients are complete when its first unit's are.
    """
    first = [0, *accumulate(plan.units_of_chunks)]
    executed = chunks
    if plan.units is not None:
        executed = {
            unit: chunk.part(units, unit)
            for index, chunk in chunks.items()
            for unit in range(first[index], first[index + 1])
        }
    scattered = plan.weights is not None and bool(plan.weights.scattered)
    return executed, executed if scattered else {first[index]: chunk for index, chunk in chunks.items()}
