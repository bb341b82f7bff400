"""Tensors that are alive during one step, from one action to another: packed inputs and the ends of a graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megasnn.common.bundle import Bundle, map_entries
from megasnn.common.checks import explained
from megasnn.common.recompute import Cache
from megasnn.kernels.spike_codec import Content, bits_of, remember_bits
from megasnn.layers.shape_inference import is_channels_last
from megasnn.layers.weight_grad import WeightGradientTask
from megasnn.models.description import Carried
from megasnn.pipeline.p2p import TensorSpec
from megasnn.schedule.actions import ActionKey

OutputConsumer = Callable[[Any, Any], None]
"""Called with (output without gradient, targets), once for each window of each micro-batch, but for padding."""


class PackedInput:
    """Tensors that a chunk is given, as they would travel between stages: spikes as bits, counts as bytes.

    Spikes go on knowing their bits, so that layers need not pack them again.

    Args:
        tensors: of `carried`.
    Attributes:
        collected: results of exchanges in the first forward, for the second one.
    Raises:
        ValueError: outside of a step, values that do not fit their format.
    """

    def __init__(self, tensors: Sequence[Tensor], carried: Sequence[Carried]) -> None:
        self.collected: Cache = deque()
        self._packed = [_packed(tensor, each) for tensor, each in zip(tensors, carried, strict=True)]

    def restored(self) -> list[Tensor]:
        """Tensors with the memory order that they had; to be called once."""
        packed, self._packed = self._packed, []
        return [each if isinstance(each, Tensor) else _with_bits(each[0].unpack(each[1]), *each) for each in packed]


def _packed(tensor: Tensor, carried: Carried) -> Tensor | tuple[TensorSpec, Tensor]:
    if carried.content is Content.DENSE or not is_channels_last(tensor):
        return tensor
    spec = TensorSpec(tuple(tensor.shape), tensor.dtype, carried.content, tensor.requires_grad)
    with explained(partial("{}: {}".format, carried.name)):
        message = spec.pack(tensor)
    _with_bits(tensor, spec, message)
    return spec, message


def _with_bits(tensor: Tensor, spec: TensorSpec, message: Tensor) -> Tensor:
    """Tensor that knows its bits, where layers would pack it in the same order."""
    knows = spec.content is Content.SPIKES and tensor.ndim > 2 and tensor.movedim(2, -1).is_contiguous()
    return remember_bits(tensor, message) if knows else tensor


@dataclass(frozen=True)
class MicroBatchInput:
    """Micro-batch for the executor; inputs only where the first segment is, targets where the last one is.

    Attributes:
        inputs: of the model by name, or the tensor of the only one: `[n, ...]`, `[T, n, ...]` or `[n, T, ...]`.
        targets: `[n, ...]`; of a classification class indices `[n]` or `[n, 1]`, or probabilities `[n, classes]`.
        size: n, known on every stage.
        samples: positions of the samples in the whole training, for dropout.
        goes_on: True for a later window of the samples of the micro-batch before: neurons go on from the state that it
            left. A segment's forwards are in ascending order in every schedule, as its validation proves.
        is_padding: keeps this replica in step with others, in evaluation; nobody is told of its output.
        left_out: places of samples whose outputs an evaluation does not count.
    """

    inputs: Tensor | Mapping[str, Tensor] | None
    targets: Tensor | None
    size: int
    samples: range | None = None
    goes_on: bool = False
    is_padding: bool = False
    left_out: frozenset[int] = frozenset()

    def counted(self, output: Bundle) -> tuple[Bundle, Tensor | None]:
        """Returns the outputs `[T, n, ...]` and targets of the samples that an evaluation counts."""
        if not self.left_out or self.targets is None:
            return output, self.targets
        places = [place for place in range(self.size) if place not in self.left_out]
        return map_entries(lambda entry: entry[:, places], output), self.targets[places]


@dataclass
class StepState:
    """Inputs, outputs, graphs and gradients of one step, by segment and micro-batch; each goes when it is used up.

    Attributes:
        repeated: forwards that are computed again. stashed: what these are computed from.
        consume: takes outputs in evaluation; None in training.
        inputs: of segments whose forward is to come. outputs: to be sent to the next segment.
        learning: places of the tensors that a segment hands on and that require a gradient.
        backwards: of segments whose forward is done; None where there is nothing to learn.
        gradients: of those tensors of a segment's output, for its backward.
        awaited: inputs that require a gradient, without values, until that is there.
        weight_gradients: left by backwards of input gradients.
    """

    micro_batches: Sequence[MicroBatchInput]
    anchor: Tensor
    repeated: frozenset[ActionKey] = frozenset()
    consume: OutputConsumer | None = None
    stashed: dict[ActionKey, PackedInput] = field(default_factory=dict)
    learning: dict[ActionKey, list[int]] = field(default_factory=dict)
    inputs: dict[ActionKey, list[Tensor]] = field(default_factory=dict)
    outputs: dict[ActionKey, list[Tensor]] = field(default_factory=dict)
    backwards: dict[ActionKey, Callable[[], None] | None] = field(default_factory=dict)
    gradients: dict[ActionKey, Sequence[Tensor]] = field(default_factory=dict)
    awaited: dict[ActionKey, Sequence[Tensor]] = field(default_factory=dict)
    weight_gradients: dict[ActionKey, deque[WeightGradientTask]] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)

    def entered(self, key: ActionKey) -> list[Tensor]:
        """Inputs of a segment behind the first, which begin its graph and are here no longer."""
        xs, before = self.inputs.pop(key), (key[0] - 1, key[1])
        learning = [index for index, x in enumerate(xs) if x.requires_grad]
        if not torch.is_grad_enabled() or not learning:
            self.gradients[before] = ()
            return xs
        self.awaited[key] = [torch.empty_like(xs[index], device="meta") for index in learning]
        # Leaves in its place would keep the dense inputs alive until backward, where the layers keep them packed.
        deliver = partial(self.gradients.__setitem__, before)
        entered = _Entry.apply(self.anchor, deliver, *(xs[index].detach() for index in learning))
        for index, x in zip(learning, entered, strict=True):
            xs[index] = remember_bits(x, bits_of(xs[index]))
        return xs

    def await_gradients(self, key: ActionKey, y: Sequence[Tensor]) -> None:
        """Backward starts from the edges of the graph; the values are needed by the next segment only."""
        self.learning[key] = learning = [index for index, each in enumerate(y) if each.requires_grad]
        self.backwards[key] = None
        if learning:
            # Gradients that are given to backward live until it is over; those that it takes go when they are used up.
            end: Tensor = _Exit.apply(partial(self.gradients.pop, key), *(y[index] for index in learning))
            self.backwards[key] = partial(torch.autograd.backward, get_gradient_edge(end), torch.zeros_like(end))

    def backward(self, key: ActionKey) -> None:
        backward = self.backwards.pop(key)
        if backward is None:  # a segment may have nothing to learn
            self.gradients.pop(key, None)
        else:
            backward()
        awaited, before = self.awaited.pop(key, ()), (key[0] - 1, key[1])
        if awaited and before not in self.gradients:  # nothing with a derivative has led to its inputs
            self.gradients[before] = [torch.zeros_like(each, device=self.anchor.device) for each in awaited]


def without_graph(y: Tensor) -> Tensor:
    """Output of the same memory, which also knows its bits and needs a gradient or not."""
    return remember_bits(y.detach().requires_grad_(y.requires_grad), bits_of(y))


class _Entry(torch.autograd.Function):
    """Begins a segment's graph: hands on its inputs and, in backward, all their gradients at once; zeros for an input
    that nothing has learnt from."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, deliver: Callable[[Sequence[Tensor]], None], *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.deliver = deliver
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.deliver(gradients)
        return None, None, *(None for _ in gradients)


class _Exit(torch.autograd.Function):
    """Ends a segment's graph: a zero, whose backward asks for the gradients of the outputs."""

    @staticmethod
    def forward(ctx: Any, take: Callable[[], Sequence[Tensor]], *ys: Tensor) -> Tensor:
        ctx.take = take
        return ys[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.take()
