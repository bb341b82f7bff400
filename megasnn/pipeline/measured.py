"""Costs of layers, measured: on every rank at the same time, taken from one rank, told to all.

Ranks that used figures of their own would cut the model differently and wait for each other for ever. All of them
measure nevertheless: in training every core is at work, and shares caches and memory with the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from megasnn.bundle import Bundle
from megasnn.layers.context import BuildContext
from megasnn.layers.rows import own_rows_of
from megasnn.models.description import INPUT, ModelDescription, frames_of
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.costs import LayerCost, LinkCost, PipelineCosts, crossing
from megasnn.pipeline.link import measure_link
from megasnn.pipeline.measured_layer import ROUNDS, MeasuredLayer, MeasuredLayers
from megasnn.pipeline.memory import measure_memory
from megasnn.pipeline.p2p import WireOptions

IN_FLIGHT = 2  # micro-batches that are forward before one is backward, as in a pipeline: memory is not reused at once


def agreed_costs(
    model: ModelDescription,
    samples: int,
    context: BuildContext,
    state: ParallelState,
    wires: WireOptions = WireOptions(),  # noqa: B008  (frozen)
    repeats: bool = False,
) -> PipelineCosts:
    """The costs for micro-batches of `samples` samples as the first rank measured them; the same on every rank.

    Args:
        repeats: whether that of a forward that is computed again is wanted, too.
    """
    world, stages = state.world, state.pipeline.size
    if world.size > 1:
        dist.barrier(group=world.handle)  # who begins before the others would measure a quieter machine
    # Where replicas share weights, no rank has memory for a stage's.
    parts = stages if context.weight.size == 1 else len(model.layers)
    layers = measure_layers(model, samples, context, state.device, wires, parts, repeats)
    measured = [PipelineCosts(tuple(layers), LinkCost())]
    if world.size > 1:
        dist.barrier(group=world.handle)
        link, wire = measured[0].link, state.communicators.wire
        if stages > 1:
            state.communicators.start_messages(state.pipeline, 0, 1)
            link = measure_link(state.pipeline, wire)
        if context.weight.size > 1:
            state.communicators.start_messages(context.weight, 0, 1)
        replicas = measure_link(context.weight, wire) if context.weight.size > 1 else None
        measured[0] = PipelineCosts(tuple(layers), link, replicas)
        dist.broadcast_object_list(measured, src=0, group=world.handle)
    return measured[0]


def measure_layers(
    model: ModelDescription,
    samples: int,
    context: BuildContext,
    device: torch.device,
    wires: WireOptions,
    stages: int = 1,
    repeats: bool = False,
) -> list[LayerCost]:
    """Medians over a few runs of each layer, on copies of its own: the model in training is not touched.

    Layers run one after another as in training: one that ran alone would find its weights in the cache, and its output
    in memory that is warm from the last time. No more exist at a time than a stage has. Values come from keyed
    generators: no random state moves. Collective over the context's tensor group and the ranks that share a
    micro-batch, whose exchanges are part of the cost.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((samples, *model.input_shape), generator=generator).to(device, context.dtype)
    outputs: dict[int, Bundle] = {INPUT: own_rows_of(frames_of(x, model.input_shape), context)}
    measured = MeasuredLayers(model, context, range(samples), device)
    costs: list[LayerCost] = []
    each = -(-len(model.layers) // stages)
    quiet = True if dist.is_initialized() and dist.get_rank() > 0 else None  # None: only on a terminal
    for first in tqdm(range(0, len(model.layers), each), desc="measuring layers", leave=False, disable=quiet):
        layers = [measured(index) for index in range(first, min(first + each, len(model.layers)))]
        outputs = _measure(layers, outputs, repeats)
        costs += [layer.cost(wires) for layer in layers]
        outputs = {number: outputs[number] for number in model.needed_from(first + len(layers))}
    memory = measure_memory(model, samples, context, device, wires, repeats=repeats).layers
    names = "held", "working", "found", "working_again", "working_whole", "deferred", "output", "cast"
    return [
        replace(cost, **{name: getattr(of_layer, name) for name in names})
        for cost, of_layer in zip(crossing(model, costs), memory, strict=True)
    ]


def _measure(layers: Sequence[MeasuredLayer], given: Mapping[int, Bundle], repeats: bool) -> dict[int, Bundle]:
    """Runs the layers as a stage would.

    Args:
        given: the outputs of layers before, by number.
    Returns:
        these, and the layers' own.
    """
    outputs: dict[int, Bundle] = {}
    for number in range(ROUNDS + 2):
        for _ in range(IN_FLIGHT):
            outputs = dict(given)
            for layer in layers:
                inputs = [outputs[source] for source in layer.takes]
                outputs[layer.number] = layer.forward(inputs)
        if repeats:
            for layer in layers:
                layer.repeat([outputs[source] for source in layer.takes])
        for _ in range(IN_FLIGHT):
            gradients: dict[int, Sequence[Tensor]] = {}
            for layer in reversed(layers):
                found = layer.backward(gradients.pop(layer.number, None))
                if found is not None and len(layer.takes) == 1:  # of several inputs, ones do for the time that it takes
                    gradients[layer.takes[0]] = found
        for _ in range(IN_FLIGHT):
            for layer in reversed(layers):
                layer.add_weight_gradients()
        if number < 2:
            for layer in layers:
                layer.clock.times.clear()  # the first round pays for compiling and for the gradients' memory
    return outputs
