"""A step's tensors between its actions, and packed inputs for recomputation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megasnn.common.autograd import Function
from megasnn.common.bundle import Bundle, map_entries
from megasnn.common.checks import explained
from megasnn.common.recompute import Cache
from megasnn.kernels.layout import is_channels_last
from megasnn.kernels.spike_codec import Content, remember_bits, share_bits
from megasnn.layers.weight_grad import WeightGradientTask
from megasnn.models.description import Carried
from megasnn.pipeline.p2p import TensorSpec
from megasnn.schedule.actions import ActionKey

OutputConsumer = Callable[[Any, Any], None]
"""Called with (output without gradient, targets), once for each window of each micro-batch without padding."""


class PackedInput:
    """A chunk's inputs, packed as between stages: spikes as bits, ternary ones as two, counts as bytes.
    Attributes:
        collective_cache: collectives' results in the first forward, for the recomputation.
    Raises:
        ValueError: values that do not fit the packing, outside a step.
    """

    def __init__(self, tensors: Sequence[Tensor], carried: Sequence[Carried]) -> None:
        self.collective_cache: Cache = deque()
        self._packed = [_pack(tensor, each) for tensor, each in zip(tensors, carried, strict=True)]

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


def _pack(tensor: Tensor, carried: Carried) -> Tensor | tuple[TensorSpec, Tensor]:
    if carried.content is Content.DENSE or not is_channels_last(tensor):
        return tensor
    spec = TensorSpec(tuple(tensor.shape), tensor.dtype, carried.content, tensor.requires_grad)
    with explained(partial("{}: {}".format, carried.name)):
        message = spec.pack(tensor)
    _with_bits(tensor, spec, message)
    return spec, message


def _with_bits(tensor: Tensor, spec: TensorSpec, message: Tensor) -> Tensor:
    is_same = spec.content.is_bits and tensor.ndim > 2 and tensor.movedim(2, -1).is_contiguous()
    # Only if layers would pack in the same order.
    return remember_bits(tensor, message, spec.content) if is_same else tensor


@dataclass(frozen=True)
class MicroBatchInput:
    """Micro-batch for the executor.

    Attributes:
        inputs: on the first segment's rank: by name, or the single input, `[n, ...]`, `[T, n, ...]` or `[n, T, ...]`.
        targets: on the last segment's rank: `[n, ...]`, class indices `[n]` or `[n, 1]`, probabilities `[n, classes]`.
        size: n, on every rank.
        total_size: samples on all context-parallel ranks; 0 where it is `size`.
        samples: positions in the whole training, for dropout.
        goes_on: a later window with the previous micro-batch's samples; neurons continue from their state.
        is_padding: an evaluation drops the output; other replicas have one micro-batch more.
        predicts: targets are the samples' indices, and no layer takes them.
        left_out: sample indices that an evaluation does not count.
    """

    inputs: Tensor | Mapping[str, Tensor] | None
    targets: Tensor | None
    size: int
    samples: range | None = None
    # Neurons continue from their state: every schedule runs a segment's forwards in ascending order.
    goes_on: bool = False
    is_padding: bool = False
    predicts: bool = False
    left_out: frozenset[int] = frozenset()
    total_size: int = 0

    def counted(self, output: Bundle) -> tuple[Bundle, Tensor | None]:
        """Outputs `[T, n, ...]` and targets that an evaluation counts."""
        if not self.left_out or self.targets is None:
            return output, self.targets
        indices = [index for index in range(self.size) if index not in self.left_out]
        return map_entries(lambda entry: entry[:, indices], output), self.targets[indices]


class StepState:
    """A step's tensors by segment and micro-batch, each until its last use. Fields stand in a micro-batch's order.

    Args:
        anchor: a leaf with a gradient, which makes the detached input of a segment part of autograd's graph.
    Attributes:
        consume: receives outputs in evaluation; None in training.
        inputs: of segments whose forward is still to come.
        stashed: packed inputs of forwards to be recomputed.
        needing_grad: indices of sent outputs with a gradient.
        losses: of micro-batches, without a graph.
        ends: ends of graphs, from which backward starts; None without a gradient.
        awaited: inputs with a gradient, without values, until the gradient exists.
        weight_gradients: tasks left by input gradients.
    """

    def __init__(self, anchor: Tensor) -> None:
        self._anchor = anchor
        self.micro_batches: Sequence[MicroBatchInput] = ()
        self.consume: OutputConsumer | None = None
        self.inputs: dict[ActionKey, list[Tensor]] = {}
        self.stashed: dict[ActionKey, PackedInput] = {}
        self.outputs: dict[ActionKey, list[Tensor]] = {}
        self.needing_grad: dict[ActionKey, list[int]] = {}
        self.losses: list[Tensor] = []
        self.ends: dict[ActionKey, Tensor | None] = {}
        self.awaited: dict[ActionKey, Sequence[Tensor]] = {}
        self.gradients: dict[ActionKey, Sequence[Tensor]] = {}
        self.weight_gradients: dict[ActionKey, deque[WeightGradientTask]] = {}

    def reset(self, micro_batches: Sequence[MicroBatchInput] = (), consume: OutputConsumer | None = None) -> None:
        """Begins a step, or without micro-batches frees all tensors."""
        self.micro_batches = micro_batches
        self.consume = consume
        self.losses.clear()
        forward: tuple[dict[ActionKey, Any], ...] = (self.inputs, self.stashed, self.outputs, self.needing_grad)
        backward: tuple[dict[ActionKey, Any], ...] = (self.ends, self.awaited, self.gradients, self.weight_gradients)
        for by_key in forward + backward:
            by_key.clear()

    def take_inputs(self, key: ActionKey) -> Any:
        """A segment's inputs, at the beginning of its autograd graph."""
        segment, micro_batch = key
        if segment == 0:
            # The model's own inputs lie in the batch and need no gradient.
            return self.micro_batches[micro_batch].inputs
        xs = self.inputs.pop(key)
        before = segment - 1, micro_batch
        needing_grad = [index for index, x in enumerate(xs) if x.requires_grad]
        if not torch.is_grad_enabled() or not needing_grad:
            self.gradients[before] = ()
            return xs
        self.awaited[key] = [torch.empty_like(xs[index], device="meta") for index in needing_grad]
        # Not leaves: autograd would hold the dense inputs until backward, while the layers store them packed.
        deliver = partial(self.gradients.__setitem__, before)
        entered = _Entry.apply(self._anchor, deliver, *[xs[index].detach() for index in needing_grad])
        for index, x in zip(needing_grad, entered, strict=True):
            xs[index] = share_bits(xs[index], x)
        return xs

    def hand_on(self, key: ActionKey, y: Sequence[Tensor], is_here: bool) -> None:
        """Outputs become the next segment's inputs, or are kept to be sent. `is_here`: the next one is this rank's."""
        outputs = [without_graph(each) for each in y]
        segment, micro_batch = key
        if is_here:
            self.inputs[segment + 1, micro_batch] = outputs
        else:
            self.outputs[key] = outputs
            self.needing_grad[key] = [index for index, each in enumerate(outputs) if each.requires_grad]

    def await_gradients(self, key: ActionKey, y: Sequence[Tensor]) -> None:
        """Ends the graph behind the outputs, whose gradients backward will take from `gradients`."""
        needing_grad = [index for index, each in enumerate(y) if each.requires_grad]
        self.ends[key] = None
        if needing_grad:
            # Arguments of `torch.autograd.backward` live until it ends; gradients from `_Exit` until their last use.
            self.ends[key] = _Exit.apply(partial(self.gradients.pop, key), *[y[index] for index in needing_grad])

    def backward(self, key: ActionKey) -> None:
        """Input gradients become `gradients` of the segment before."""
        end = self.ends.pop(key)
        if end is None:
            self.gradients.pop(key, None)
        else:
            torch.autograd.backward(end)
        awaited = self.awaited.pop(key, ())
        segment, micro_batch = key
        before = segment - 1, micro_batch
        if awaited and before not in self.gradients:
            # No path of the graph led to the inputs.
            self.gradients[before] = [torch.zeros_like(each, device=self._anchor.device) for each in awaited]


def without_graph(y: Tensor) -> Tensor:
    """The output on the same memory, with its bits and `requires_grad`, outside the graph."""
    return share_bits(y, y.detach().requires_grad_(y.requires_grad))


class _Entry(Function):
    """Starts a segment's graph: returns its inputs. Backward delivers all their gradients, or zeros, at once."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, deliver: Callable[[Sequence[Tensor]], None], *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.deliver = deliver
        return tuple([x.view_as(x) for x in xs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.deliver(gradients)
        return None, None, *[None] * len(gradients)


class _Exit(Function):
    """Ends a segment's graph: a zero. Backward takes the output gradients."""

    @staticmethod
    def forward(ctx: Any, take: Callable[[], Sequence[Tensor]], *ys: Tensor) -> Tensor:
        ctx.take = take
        return ys[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.take()
