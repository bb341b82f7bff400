"""What each layer costs, measured on one rank and told to all, for balancing the pipeline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.comm.group import Group
from megasnn.layers.context import BuildContext
from megasnn.layers.keyed import apply_layer
from megasnn.models.description import ModelDescription
from megasnn.sharding import materialise

REPETITIONS = 3


def agreed_layer_costs(
    model: ModelDescription, samples: int, context: BuildContext, device: torch.device, world: Group
) -> list[float]:
    """Seconds of forward and backward of each layer for `samples` samples, as rank 0 measured them, on every rank.

    Ranks that measured for themselves would cut the model differently and wait for each other forever.
    """
    costs: list[list[float]] = [[]]
    if world.rank == 0:
        costs[0] = measure_layer_costs(model, samples, context, device)
    if world.size > 1:
        dist.broadcast_object_list(costs, src=0, group=world.handle)
    return costs[0]


def measure_layer_costs(
    model: ModelDescription, samples: int, context: BuildContext, device: torch.device
) -> list[float]:
    """The fastest of three runs of each layer, on copies of its own: the model in training is not touched.

    A layer is built whole (tensor parallelism divides all of them alike), measured on the output of the layer before
    it, and dropped again, so that at most one layer exists at a time. Values come from keyed generators: no random
    state moves.
    """
    generator = torch.Generator().manual_seed(0)
    alone = replace(context, tensor=Group("tensor"))
    shape = (samples, *model.input_shape)
    x = torch.randn(shape, generator=generator).to(device, context.dtype)
    costs = []
    for index, description in enumerate(model.layers):
        layer = description.build(alone)
        materialise([(description.name, layer)], device, seed=0)
        x, seconds = _measure(layer, x, range(samples), needs_input_gradient=index > 0)
        costs.append(seconds)
    return costs


def _measure(layer: torch.nn.Module, x: Tensor, samples: range, needs_input_gradient: bool) -> tuple[Tensor, float]:
    times = []
    # The first run pays for compiling and allocating; it is not counted.
    for _ in range(REPETITIONS + 1):
        entry = x.detach().requires_grad_(needs_input_gradient)
        start = _now(x.device)
        y = apply_layer(layer, entry, samples)
        y.backward(torch.ones_like(y))
        times.append(_now(x.device) - start)
        layer.zero_grad()
    return y.detach(), min(times[1:])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def layers_per_chunk(bounds: Sequence[range]) -> str:
    """Layers of each chunk, as `--pipeline-model-parallel-layout` takes them."""
    return "|".join(str(len(span)) for span in bounds)
