"""The bytes that each layer needs for a micro-batch, counted before the first step."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable
from dataclasses import replace

import torch

from megasnn.bundle import Bundle, entries_of
from megasnn.comm.collectives import all_reduce_sum
from megasnn.comm.group import Group, alone
from megasnn.layers.cast_weights import CastWeights
from megasnn.layers.context import BuildContext
from megasnn.layers.rows import own_rows_of
from megasnn.models.description import INPUT, LayerDescription, ModelDescription, frames_of
from megasnn.pipeline.costs import LayerCost, LinkCost, PipelineCosts, crossing, for_samples
from megasnn.pipeline.counted_layer import CountedLayer, LayerMemory
from megasnn.pipeline.measured_layer import MeasuredLayers
from megasnn.pipeline.p2p import TensorDescriptor, WireOptions

TRIAL_SAMPLES = 1, 2
COUNTED_AS_THEY_ARE = 4
"""Samples of a micro-batch. Of few, other moments are the peak than of many: weights' gradients take most."""


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

    Up to four samples are counted as they are; more with one sample and with two: each more needs as much more. Layers
    that are built alike and take the same shape are tried once. It takes the memory of one layer. Collective over
    `world`.

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
    sizes = TRIAL_SAMPLES if samples > COUNTED_AS_THEY_ARE else (samples,)
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
                cost = replace(for_samples(counted, samples, sizes), cast=cast)
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
