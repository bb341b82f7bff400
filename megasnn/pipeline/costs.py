"""What each layer and each boundary between stages costs: measured, taken from one rank, told to all.

Ranks that used figures of their own would cut the model differently and wait for each other for ever. All of them
measure nevertheless, at the same time: in training every core is at work, and shares caches and memory with the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from megasnn.comm.group import Group
from megasnn.layers.context import BuildContext
from megasnn.layers.weight_gradients import WeightGradients
from megasnn.models.description import LayerDescription, ModelDescription
from megasnn.pipeline.link import LinkCost, measure_link
from megasnn.pipeline.p2p import TensorDescriptor, WireOptions, messages_of
from megasnn.schedule import ChunkCost, Transfer
from megasnn.schedule.memory import stage_shares
from megasnn.sharding import materialise

IN_FLIGHT = 2  # micro-batches that are forward before one is backward, as in a pipeline: memory is not reused at once
ROUNDS = 3


@dataclass(frozen=True)
class LayerCost:
    """One micro-batch through one layer, seconds and bytes.

    Attributes:
        forward, input_gradient, weight_gradient: to compute.
        held: bytes kept from the forward until the weight gradient is done.
        message, gradient: bytes of the output and of its gradient on the way to another stage.
        pack, unpack: seconds to make the message of the output, and to restore the output from it.
    """

    forward: float
    input_gradient: float
    weight_gradient: float
    held: int = 0
    message: int = 0
    gradient: int = 0
    pack: float = 0.0
    unpack: float = 0.0

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.input_gradient + self.weight_gradient


@dataclass(frozen=True)
class PipelineCosts:
    """Of every layer of a model for one micro-batch, and of the way between two stages."""

    layers: tuple[LayerCost, ...]
    link: LinkCost

    def of_chunks(self, bounds: Sequence[range], placement: Sequence[int]) -> list[ChunkCost]:
        """For the simulator, in seconds; activations in whole stages' micro-batches.

        Args:
            bounds: the layers of each chunk. placement: its rank.
        """
        shares = stage_shares(placement)
        return [self._of_chunk(span, share) for span, share in zip(bounds, shares, strict=True)]

    def held_bytes(self, bounds: Sequence[range]) -> list[int]:
        """What each chunk keeps of a micro-batch from forward to backward."""
        return [sum(self.layers[i].held for i in span) for span in bounds]

    def _of_chunk(self, span: range, share: float) -> ChunkCost:
        layers = [self.layers[i] for i in span]
        # What a chunk without layers hands on is what it was given.
        last = self.layers[span.stop - 1] if span.stop > 0 else LayerCost(0, 0, 0)
        inputs, weights = (sum(getattr(each, f"{part}_gradient") for each in layers) for part in ("input", "weight"))
        return ChunkCost(
            forward=sum(each.forward for each in layers),
            backward=inputs + weights,
            activation=share,
            input_gradient=inputs,
            weight_gradient=weights,
            output=self._transfer(last.message, last.pack, last.unpack),
            gradient=self._transfer(last.gradient, 0.0, 0.0),
        )

    def _transfer(self, size: int, pack: float, unpack: float) -> Transfer:
        link = self.link
        sender, receiver = size * link.sender_per_byte, size * link.receiver_per_byte
        on_the_way = link.latency + size * link.per_byte - sender - receiver
        return Transfer(on_the_way, pack + sender, unpack + receiver)


def agreed_costs(
    model: ModelDescription,
    samples: int,
    context: BuildContext,
    device: torch.device,
    world: Group,
    pipeline: Group,
    wires: WireOptions = WireOptions(),  # noqa: B008  (frozen)
) -> PipelineCosts:
    """The costs for micro-batches of `samples` samples as the first rank measured them; the same on every rank."""
    if world.size > 1:
        dist.barrier(group=world.handle)  # who begins before the others would measure a quieter machine
    measured = [PipelineCosts(tuple(measure_layers(model, samples, context, device, wires)), LinkCost())]
    if world.size > 1:
        dist.barrier(group=world.handle)
        measured[0] = replace(measured[0], link=measure_link(pipeline, device))
        dist.broadcast_object_list(measured, src=0, group=world.handle)
    return measured[0]


def measure_layers(
    model: ModelDescription, samples: int, context: BuildContext, device: torch.device, wires: WireOptions
) -> list[LayerCost]:
    """Medians over a few runs of each layer, on copies of its own: the model in training is not touched.

    A layer is built whole (tensor parallelism divides all of them alike), measured on the output of the layer before
    it, and dropped again, so that at most one layer exists at a time. Values come from keyed generators: no random
    state moves.
    """
    generator = torch.Generator().manual_seed(0)
    alone = replace(context, tensor=Group("tensor"))
    x = torch.randn((samples, *model.input_shape), generator=generator).to(device, context.dtype)
    costs = []
    for index, description in enumerate(model.layers):
        cost, x = _measure(description, x, alone, needs_input_gradient=index > 0)
        costs.append(_with_messages(cost, x, description, wires))
    return costs


def _measure(
    description: LayerDescription, x: Tensor, context: BuildContext, needs_input_gradient: bool
) -> tuple[LayerCost, Tensor]:
    weight_gradients = WeightGradients()
    layer = description.build(replace(context, weight_gradients=weight_gradients))
    materialise([(description.name, layer)], x.device, seed=0)
    clock = _Clock(x.device)
    with _counting_saved(layer) as held:
        y = layer(x.detach().requires_grad_(needs_input_gradient))
    gradient = torch.ones_like(y)
    for number in range(ROUNDS + 1):
        edges, left = [], []
        for _ in range(IN_FLIGHT):
            entry = x.detach().requires_grad_(needs_input_gradient)
            with clock("forward"):
                y = layer(entry)
            edges.append(get_gradient_edge(y))
            y = y.detach()
        for edge in edges:
            with clock("input_gradient"), weight_gradients.deferred() as tasks:
                torch.autograd.backward(edge, gradient)
            left.append(tasks)
        for tasks in left:
            with clock("weight_gradient"):
                for task in tasks:
                    task()
        if number == 0:
            clock.times.clear()  # the first round pays for compiling and for gradients' first memory
    forward, inputs, weights = (median(clock.times[n]) for n in ("forward", "input_gradient", "weight_gradient"))
    return LayerCost(forward, inputs, weights, held=held[0]), y


def _with_messages(cost: LayerCost, y: Tensor, description: LayerDescription, wires: WireOptions) -> LayerCost:
    """Adds what it costs to hand the output to another stage."""
    descriptor = TensorDescriptor.of(y, description.output)
    clock = _Clock(y.device)
    for _ in range(ROUNDS):
        with clock("pack"):
            messages = messages_of(descriptor.flatten(y), descriptor)
        with clock("unpack"):
            descriptor.restore(messages[0])
    width = (wires.gradient_dtype or y.dtype).itemsize
    return replace(
        cost,
        message=sum(message.nbytes for message in messages),
        gradient=y.numel() * width,
        pack=median(clock.times["pack"]),
        unpack=median(clock.times["unpack"]),
    )


@contextmanager
def _counting_saved(layer: nn.Module) -> Iterator[list[int]]:
    """Inside, the one element of the list is the bytes that autograd keeps for backward, weights not counted."""
    seen = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), *layer.buffers())}
    total = [0]

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total[0] += storage.nbytes()
        return tensor

    with saved_tensors_hooks(count, lambda tensor: tensor):
        yield total


class _Clock:
    """Attributes: times: seconds of each block by name."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.times: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = self._now()
        yield
        self.times.setdefault(name, []).append(self._now() - start)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def layers_per_chunk(bounds: Sequence[range]) -> str:
    """Layers of each chunk, as `--pipeline-model-parallel-layout` takes them."""
    return "|".join(str(len(span)) for span in bounds)
