"""A model whose layers sleep for the time that they are said to take, and compute nothing.

What is around them is real: a layer's output is a tensor that travels and is kept as a spiking one, its parameter has a
gradient in a bucket, its backward has two parts. So ranks that could never compute beside each other can sleep beside
each other, and what a schedule, its transfers and its reductions take is seen on a machine with a few cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megasnn.again import once
from megasnn.comm.codec import Content, encoded_like
from megasnn.layers.context import BuildContext
from megasnn.layers.initialisers import zeros
from megasnn.layers.weight_gradients import Leave
from megasnn.models.description import LayerDescription, ModelDescription
from megasnn.pipeline.costs import LayerCost
from megasnn.sharded_tensors import declare_parameter

CLASSES = 2
FLOAT = 4  # bytes
ROW = 256  # values in a row of a parameter
Sleep = Callable[[float], None]  # seconds


@dataclass(frozen=True)
class SleepingLayer:
    """What a layer is said to cost.

    Attributes:
        forward, input_gradient, weight_gradient, again: seconds, as in LayerCost.
        gradient: bytes of its output, and of the gradient of that. content: what the output is said to hold.
        parameters: bytes of them.
    """

    forward: float
    input_gradient: float
    weight_gradient: float
    again: float
    gradient: int
    content: Content
    parameters: int

    @classmethod
    def like(cls, cost: LayerCost) -> SleepingLayer:
        """As a layer was measured; what is sent is packed as its message was, or nearly so."""
        again = cost.forward if cost.again is None else cost.again
        times = cost.forward, cost.input_gradient, cost.weight_gradient, again
        sizes = {Content.DENSE: 1.0, Content.COUNTS: 1 / FLOAT, Content.SPIKES: 1 / (8 * FLOAT)}
        packed = cost.message / max(cost.gradient, 1)
        content = min(sizes, key=lambda each: abs(sizes[each] - packed))
        return cls(*times, cost.gradient, content, cost.parameters)

    @property
    def values(self) -> int:
        """Of the output."""
        return max(1, self.gradient // FLOAT)

    def cost(self) -> LayerCost:
        """For the simulator."""
        message = encoded_like(self.values, self.content, torch.float32, torch.device("meta")).nbytes
        return LayerCost(
            self.forward,
            self.input_gradient,
            self.weight_gradient,
            message=message,
            gradient=self.values * FLOAT,
            parameters=self.parameters,
            again=self.again,
        )


def sleeping_model(layers: Sequence[SleepingLayer], sleep: Sleep) -> ModelDescription:
    """A chain of them; the last one gives logits."""
    last = len(layers) - 1

    def build(context: BuildContext) -> list[nn.Module]:
        sizes = [each.values for each in layers[:-1]] + [CLASSES]
        return [_Sleeper(each, size, sleep, context) for each, size in zip(layers, sizes, strict=True)]

    described = [
        LayerDescription(f"sleeper.{number}", f"sleeper.{number}", Content.DENSE if number == last else each.content)
        for number, each in enumerate(layers)
    ]
    return ModelDescription(tuple(described), build, time_steps=1, input_shape=(1, 1, 1), num_classes=CLASSES)


class _Sleeper(nn.Module):
    weight: Tensor

    def __init__(self, cost: SleepingLayer, values: int, sleep: Sleep, context: BuildContext) -> None:
        super().__init__()
        self.cost, self.values, self.sleep, self.weight_gradients = cost, values, sleep, context.weight_gradients
        rows = max(1, cost.parameters // (FLOAT * ROW))
        declare_parameter(self, "weight", context.shard((rows, ROW), initialise=zeros), context.dtype)

    def forward(self, x: Tensor) -> Tensor:
        is_first = list[bool]()
        once(lambda: is_first.append(True))
        self.sleep(self.cost.forward if is_first else self.cost.again)
        y: Tensor = _Sleep.apply(x, *self.weight_gradients.of(self.weight), self)
        return y

    def add_weight_gradient(self, total: Tensor) -> None:
        """One into the first value of each row: one sees whether every micro-batch of every replica was added."""
        self.sleep(self.cost.weight_gradient)
        total[:, 0] += 1


class _Sleep(torch.autograd.Function):
    """The forward has slept already; here are the two parts of the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, leave: Leave, layer: _Sleeper) -> Tensor:
        ctx.shape, ctx.leave, ctx.layer = x.shape, leave, layer
        return x.new_zeros(1, x.shape[1], layer.values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        layer: _Sleeper = ctx.layer
        layer.sleep(layer.cost.input_gradient)
        ctx.leave(layer.add_weight_gradient)
        return gradient.new_zeros(ctx.shape), None, None, None
