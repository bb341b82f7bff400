"""What a step needs in memory on each pipeline rank, known before the first one."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from megasnn.bundle import Bundle, entries_of
from megasnn.comm.collectives import all_reduce_sum
from megasnn.comm.group import Group, alone
from megasnn.layers.cast_weights import CastWeights
from megasnn.layers.context import BuildContext
from megasnn.layers.rows import own_rows_of
from megasnn.models.description import INPUT, LayerDescription, ModelDescription, frames_of
from megasnn.pipeline.costs import LayerCost, PipelineCosts, crossing
from megasnn.pipeline.counted_layer import CountedLayer, LayerMemory
from megasnn.pipeline.link import LinkCost
from megasnn.pipeline.measured_layer import MeasuredLayers
from megasnn.pipeline.p2p import TensorDescriptor, WireOptions
from megasnn.schedule import Schedule
from megasnn.schedule.memory import UnitMemory, micro_batches_under_way, moments
from megasnn.schedule.offload import most_on_host

TRIAL_SAMPLES = 1, 2


@dataclass(frozen=True)
class StepPeak:
    """Bytes at the moment of a step when a pipeline rank needs most, above weights, gradients and optimizer state.

    Attributes:
        kept: what forwards have left for their backwards.
        working: what the computation under way needs beside that.
        messages: tensors that wait, or are on their way from and to other stages, or to replicas that own them.
        on_host: of all moments the most that is in the host's memory, which is no part of the total.
    """

    kept: int
    working: int
    messages: int
    on_host: int = 0

    @property
    def total(self) -> int:
        return self.kept + self.working + self.messages


def step_peaks(
    schedule: Schedule, bounds: Sequence[range], costs: PipelineCosts, exchanged: Sequence[int] = ()
) -> list[StepPeak]:
    """Of each pipeline rank.

    Args:
        bounds: the layers of each chunk.
        exchanged: of each, the bytes that travel to and from those who own rows, when all backwards are done.
    """
    units = costs.unit_memory(bounds, schedule.placement)
    return [
        replace(_peak(schedule, rank, units, each), on_host=round(most_on_host(schedule, rank, units)))
        for rank, each in enumerate(exchanged or [0] * schedule.ranks)
    ]


def _peak(schedule: Schedule, rank: int, units: Sequence[UnitMemory], exchanged: int) -> StepPeak:
    found = moments(schedule, rank, units, exchanged=exchanged)
    needed = [(each.kept, each.working, each.messages) for each in found]
    return StepPeak(*map(round, max(needed, key=sum)))


def graphs_bytes(schedule: Schedule, rank: int, bounds: Sequence[range], costs: PipelineCosts) -> int:
    """What the graphs of layers keep on a rank from their first replays on, see graphs.py: for as many micro-batches as
    are under way at once, what forwards and first parts of backwards leave, outputs, and gradients of inputs.

    Args: as of `step_peaks`.
    """
    total = 0
    for chunk, slots in micro_batches_under_way(schedule, rank).items():
        span = bounds[chunk]
        layers, before = costs.layers[span.start : span.stop], costs.layers[max(0, span.start - 1) : span.stop]
        total += slots * sum(each.held + each.deferred_bytes + each.waiting for each in layers)
        total += slots * sum(each.waiting for each in before if each.gradient)
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

    Counted with one sample and with two: each more needs as much more. Layers that are built alike and take the same
    shape are tried once. It takes the memory of one layer. Collective over `world`.

    Args:
        world: the group that takes part; None is this rank alone.
        seconds: no layer is begun when those before it have computed so long on the first rank. What others do on a
            busy machine does not count, nor does the first run of each, which pays for compiling as training would.
        repeats: whether that of forwards that are computed again is wanted, too.
    Raises:
        NotMeasuredError: on every rank, when time is up, or an error arose. Only where tensor or context parallel ranks
            wait for this one in the middle of a layer, an error is raised as it is.
    """
    world, computed = world or alone("world"), 0.0
    sizes = TRIAL_SAMPLES if samples > TRIAL_SAMPLES[-1] else (samples,)
    context = replace(context, cast_weights=(casts := CastWeights()))
    layers = MeasuredLayers(model, context, range(samples), device)
    outputs = [{INPUT: _images(model, size, context, device)} for size in sizes]
    known: dict[Hashable, tuple[LayerCost, list[Bundle]]] = {}
    found = []
    for index, description in enumerate(model.layers):
        inputs = [[of_size[source] for source in model.inputs[index]] for of_size in outputs]
        shapes = [(key, x.shape, x.requires_grad) for each in inputs[0] for key, x in entries_of(each).items()]
        kind = (layers.alike(index), str(description.output), tuple(shapes), index > 0)
        if kind not in known:
            error = None
            try:
                layer = layers(index)
                with casts.kept():  # as in a step, which makes each copy once
                    tried = [CountedLayer(layer, x, range(n), device) for x, n in zip(inputs, sizes, strict=True)]
                    begun = time.thread_time()
                    counted = [_with_messages(each.memory(repeats), each.output, description, wires) for each in tried]
                    computed += time.thread_time() - begun
                    cast = casts.held_bytes if context.weight.size == 1 else 0  # weights are gathered as such
                cost = replace(_for_samples(counted, samples, sizes), cast=cast)
                known[kind] = cost, [each.output for each in tried]
            except Exception as caught:
                if context.tensor.size > 1 or context.context.size > 1:
                    raise
                error = f"{description.name} failed with {type(caught).__name__}: {caught}"
            late = world.rank == 0 and index + 1 < len(model.layers) and computed >= seconds
            _go_on(world, device, error, late, seconds)
        cost, given = known[kind]
        found.append(cost)
        still_needed = model.needed_from(index + 1)
        for of_size, y in zip(outputs, given, strict=True):
            of_size[index] = y
            for number in [each for each in of_size if each not in still_needed]:
                del of_size[number]
    return PipelineCosts(tuple(crossing(model, found)), LinkCost())


def _images(model: ModelDescription, samples: int, context: BuildContext, device: torch.device) -> Bundle:
    x = torch.randn((samples, *model.input_shape), generator=torch.Generator().manual_seed(0))
    return own_rows_of(frames_of(x.to(device, context.dtype), model.input_shape), context)


def _go_on(world: Group, device: torch.device, error: str | None, late: bool, seconds: float) -> None:
    """Raises NotMeasuredError on every rank when one of them says so; collective."""
    votes = torch.tensor([error is not None, late], dtype=torch.float64, device=device)
    failed, out_of_time = all_reduce_sum(votes, world, "step").tolist()
    if failed:
        raise NotMeasuredError(error or "a layer failed on another rank")
    if out_of_time:
        raise NotMeasuredError(f"trying out the layers takes more than {seconds:g} s")


def _with_messages(memory: LayerMemory, y: Bundle, description: LayerDescription, wires: WireOptions) -> LayerCost:
    message = gradient = 0
    for key, entry in entries_of(y).items():
        message += TensorDescriptor.of(entry, description.entries[key].content).buffer(torch.device("meta")).nbytes
        width = (wires.gradient_dtype or entry.dtype).itemsize if entry.requires_grad else 0
        gradient += entry.numel() * width
    return LayerCost(0, 0, 0, message=message, gradient=gradient, **vars(memory))


def _for_samples(counted: Sequence[LayerCost], samples: int, sizes: Sequence[int]) -> LayerCost:
    """The cost for so many samples, from those for the first sizes."""
    first, second = counted[0], counted[-1]

    def grown(few: int, more: int) -> int:
        return max(0, few + (samples - sizes[0]) * (more - few))

    values = {name: grown(getattr(first, name), getattr(second, name)) for name in _IN_BYTES}
    forward, inputs, weights = map(grown, first.working, second.working)
    return replace(first, working=(forward, inputs, weights), **values)


_IN_BYTES = ("held", "message", "gradient", "found", "working_again", "working_whole", "deferred", "output")
