"""A step's tensors between its actions, and packed inputs for recomputation."""

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
"""Called with (output without gradient, targets), once for each window of each micro-batch without padding."""


class PackedInput:
    """A chunk's inputs, packed as between stages: spikes as bits, counts as bytes.

    Args:
        tensors: one for each in `carried`.
    Attributes:
        collected: collectives' results in the first forward, for the recomputation.
    Raises:
        ValueError: values that do not fit the packing, outside a step.
    """

    def __init__(self, tensors: Sequence[Tensor], carried: Sequence[Carried]) -> None:
        self.collected: Cache = deque()
        self._packed = [_packed(tensor, each) for tensor, each in zip(tensors, carried, strict=True)]

    def restored(self) -> list[Tensor]:
        """The tensors in their memory order. May be called once."""
        packed = self._packed
        self._packed = []
        tensors = []
        for each in packed:
            if isinstance(each, Tensor):
                tensors.append(each)
            else:
                spec, message = each
                tensors.append(_with_bits(spec.unpack(message), spec, message))
        return tensors


def _packed(tensor: Tensor, carried: Carried) -> Tensor | tuple[TensorSpec, Tensor]:
    if carried.content is Content.DENSE or not is_channels_last(tensor):
        return tensor
    spec = TensorSpec(tuple(tensor.shape), tensor.dtype, carried.content, tensor.requires_grad)
    with explained(partial("{}: {}".format, carried.name)):
        message = spec.pack(tensor)
    _with_bits(tensor, spec, message)
    return spec, message


def _with_bits(tensor: Tensor, spec: TensorSpec, message: Tensor) -> Tensor:
    is_same = spec.content is Content.SPIKES and tensor.ndim > 2 and tensor.movedim(2, -1).is_contiguous()
    # Only if layers would pack in the same order.
    return remember_bits(tensor, message) if is_same else tensor


@dataclass(frozen=True)
class MicroBatchInput:
    """Micro-batch for the executor.

    Attributes:
        inputs: on the first segment's rank: by name, or the single input, `[n, ...]`, `[T, n, ...]` or `[n, T, ...]`.
        targets: on the last segment's rank: `[n, ...]`, class indices `[n]` or `[n, 1]`, probabilities `[n, classes]`.
        size: n, on every rank.
        whole: samples on all context-parallel ranks; 0 where it is `size`.
        samples: positions in the whole training, for dropout.
        goes_on: a later window with the previous micro-batch's samples; neurons continue from their state.
        is_padding: an evaluation drops the output; other replicas have one micro-batch more.
        left_out: sample indices that an evaluation does not count.
    """

    inputs: Tensor | Mapping[str, Tensor] | None
    targets: Tensor | None
    size: int
    samples: range | None = None
    # Neurons continue from their state: every schedule runs a segment's forwards in ascending order.
    goes_on: bool = False
    is_padding: bool = False
    left_out: frozenset[int] = frozenset()
    whole: int = 0

    def counted(self, output: Bundle) -> tuple[Bundle, Tensor | None]:
        """Outputs `[T, n, ...]` and targets that an evaluation counts."""
        if not self.left_out or self.targets is None:
            return output, self.targets
        indices = [index for index in range(self.size) if index not in self.left_out]
        return map_entries(lambda entry: entry[:, indices], output), self.targets[indices]


@dataclass
class StepState:
    """A step's tensors by segment and micro-batch, each until its last use.

    Attributes:
        recomputed: forwards to be recomputed.
        stashed: their packed inputs.
        consume: receives outputs in evaluation; None in training.
        learning: indices of output tensors with a gradient.
        gradients: for these tensors.
        backwards: run a backward; None without a gradient.
        awaited: inputs with a gradient, without values, until the gradient exists.
        weight_gradients: tasks left by input gradients.
    """

    micro_batches: Sequence[MicroBatchInput]
    anchor: Tensor
    recomputed: frozenset[ActionKey] = frozenset()
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
        """Takes inputs of a segment after the first, and begins its graph with them."""
        xs = self.inputs.pop(key)
        before = key[0] - 1, key[1]
        learning = [index for index, x in enumerate(xs) if x.requires_grad]
        if not torch.is_grad_enabled() or not learning:
            self.gradients[before] = ()
            return xs
        self.awaited[key] = [torch.empty_like(xs[index], device="meta") for index in learning]
        # Not leaves: autograd would hold the dense inputs until backward, while the layers store them packed.
        deliver = partial(self.gradients.__setitem__, before)
        entered = _Entry.apply(self.anchor, deliver, *(xs[index].detach() for index in learning))
        for index, x in zip(learning, entered, strict=True):
            xs[index] = remember_bits(x, bits_of(xs[index]))
        return xs

    def await_gradients(self, key: ActionKey, y: Sequence[Tensor]) -> None:
        """Prepares the backward from the graph's edges, without the output's values."""
        learning = [index for index, each in enumerate(y) if each.requires_grad]
        self.learning[key] = learning
        self.backwards[key] = None
        if learning:
            # Arguments of `torch.autograd.backward` live until it ends; gradients from `_Exit` until their last use.
            end: Tensor = _Exit.apply(partial(self.gradients.pop, key), *(y[index] for index in learning))
            self.backwards[key] = partial(torch.autograd.backward, get_gradient_edge(end), torch.zeros_like(end))

    def backward(self, key: ActionKey) -> None:
        """Input gradients become `gradients` of the segment before."""
        backward = self.backwards.pop(key)
        if backward is None:
            self.gradients.pop(key, None)
        else:
            backward()
        awaited = self.awaited.pop(key, ())
        before = key[0] - 1, key[1]
        if awaited and before not in self.gradients:
            # No path of the graph led to the inputs.
            self.gradients[before] = [torch.zeros_like(each, device=self.anchor.device) for each in awaited]


def without_graph(y: Tensor) -> Tensor:
    """The output on the same memory, with its bits and `requires_grad`, outside the graph."""
    return remember_bits(y.detach().requires_grad_(y.requires_grad), bits_of(y))


class _Entry(torch.autograd.Function):
    """Starts a segment's graph: returns its inputs. Backward delivers all their gradients, or zeros, at once."""

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
    """Ends a segment's graph: a zero. Backward takes the output gradients."""

    @staticmethod
    def forward(ctx: Any, take: Callable[[], Sequence[Tensor]], *ys: Tensor) -> Tensor:
        ctx.take = take
        return ys[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.take()
