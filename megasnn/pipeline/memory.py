"""What a step needs in memory on each pipeline rank, known before the first one."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from megasnn.bundle import Bundle, entries_of, map_entries
from megasnn.comm.collectives import all_reduce_sum
from megasnn.comm.group import Group, alone
from megasnn.layers.context import BuildContext
from megasnn.models.description import INPUT, ModelDescription, frames_of
from megasnn.pipeline.costs import LayerCost, PipelineCosts, crossing
from megasnn.pipeline.link import LinkCost
from megasnn.pipeline.measured_layer import MeasuredLayers
from megasnn.pipeline.p2p import WireOptions
from megasnn.schedule import Schedule
from megasnn.schedule.memory import activations_held

TRIAL_SAMPLES = 2


@dataclass(frozen=True)
class StepPeak:
    """Bytes at the moment of a step when a pipeline rank needs most, above weights, gradients and optimizer state.

    Attributes:
        kept: what forwards have left for their backwards.
        working: what the computation under way needs beside that.
        messages: tensors on their way from and to other stages.
    """

    kept: int
    working: int
    messages: int

    @property
    def total(self) -> int:
        return self.kept + self.working + self.messages


def step_peaks(schedule: Schedule, bounds: Sequence[range], costs: PipelineCosts) -> list[StepPeak]:
    """Of each pipeline rank.

    Args:
        bounds: the layers of each chunk.
    """
    held, working = costs.held_bytes(bounds), costs.working_bytes(bounds)
    entering = costs.entering_bytes(bounds)
    peaks = []
    for rank, actions in enumerate(schedule.actions):
        before = [0, *map(round, activations_held(schedule, rank, held, entering))]
        needed = [working[action.chunk].get(action.kind, 0) for action in actions]
        most = max(zip(before, needed, strict=False), key=sum, default=(0, 0))
        peaks.append(StepPeak(*most, _messages(schedule, rank, bounds, costs)))
    return peaks


def _messages(schedule: Schedule, rank: int, bounds: Sequence[range], costs: PipelineCosts) -> int:
    """One message and one gradient for each boundary with another rank: on each link one receive is posted ahead, and
    one send is under way."""
    total = 0
    for index, (here, there) in enumerate(zip(schedule.placement, schedule.placement[1:], strict=False)):
        end = bounds[index].stop
        if rank in (here, there) and here != there and end:
            total += costs.layers[end - 1].message + costs.layers[end - 1].gradient
    return total


class NotMeasuredError(Exception):
    """Says why the layers' memory is not known, on every rank."""


def measure_memory(
    model: ModelDescription,
    samples: int,
    context: BuildContext,
    device: torch.device,
    wires: WireOptions,
    world: Group | None = None,
    seconds: float = math.inf,
    repeats: bool = False,
) -> PipelineCosts:
    """The bytes that each layer needs for a micro-batch of `samples` samples, on copies of its own; times are 0.

    Measured with a few samples, and proportional to them. Layers that are built alike and take the same shape are
    tried once. It takes the memory of one layer. Collective over `world`.

    Args:
        world: the group that takes part; None is this rank alone.
        seconds: no layer is begun when those before it have computed so long on the first rank. What others do on a
            busy machine does not count, nor does the first run of each, which pays for compiling as training would.
        repeats: whether that of forwards that are computed again is wanted, too.
    Raises:
        NotMeasuredError: on every rank, when time is up, or an error arose. Only in a layer that is cut over tensor
            parallel ranks an error is raised as it is: the others wait for this rank in the middle of the layer.
    """
    world, computed = world or alone("world"), 0.0
    trial = min(samples, TRIAL_SAMPLES)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((trial, *model.input_shape), generator=generator).to(device, context.dtype)
    outputs: dict[int, Bundle] = {INPUT: frames_of(x, model.input_shape)}
    layers = MeasuredLayers(model, context, range(trial), device)
    known: dict[Hashable, tuple[LayerCost, Bundle]] = {}
    found = []
    for index, description in enumerate(model.layers):
        inputs = [outputs[source] for source in model.inputs[index]]
        shapes = [(key, x.shape) for each in inputs for key, x in entries_of(each).items()]
        kind = (layers.alike(index), str(description.output), tuple(shapes), index > 0)
        if kind not in known:
            error = None
            try:
                layer = layers(index)
                y = layer.run_once(inputs, repeats)
                computed += layer.processor_seconds
                without_memory = map_entries(partial(torch.empty_like, device="meta"), y)
                known[kind] = _for_samples(layer.cost(wires), samples / trial), without_memory
            except Exception as caught:
                if context.tensor.size > 1:
                    raise
                error = f"{description.name} failed with {type(caught).__name__}: {caught}"
            late = world.rank == 0 and index + 1 < len(model.layers) and computed >= seconds
            _go_on(world, device, error, late, seconds)
        found.append(known[kind][0])
        outputs[index] = map_entries(partial(torch.zeros_like, device=device), known[kind][1])
        outputs = {number: outputs[number] for number in model.needed_from(index + 1)}
    return PipelineCosts(tuple(crossing(model, found)), LinkCost())


def _go_on(world: Group, device: torch.device, error: str | None, late: bool, seconds: float) -> None:
    """Raises NotMeasuredError on every rank when one of them says so; collective."""
    votes = torch.tensor([error is not None, late], dtype=torch.float64, device=device)
    failed, out_of_time = all_reduce_sum(votes, world, "step").tolist()
    if failed:
        raise NotMeasuredError(error or "a layer failed on another rank")
    if out_of_time:
        raise NotMeasuredError(f"trying out the layers takes more than {seconds:g} s")


def _for_samples(cost: LayerCost, factor: float) -> LayerCost:
    forward, inputs, weights = (round(factor * each) for each in cost.working)
    return replace(
        LayerCost(0, 0, 0),
        held=round(factor * cost.held),
        working=(forward, inputs, weights),
        message=round(factor * cost.message),
        gradient=round(factor * cost.gradient),
        parameters=cost.parameters,
        collectives=cost.collectives,
        exchanged=round(factor * cost.exchanged),
        found=round(factor * cost.found),
        working_again=None if cost.working_again is None else round(factor * cost.working_again),
    )
