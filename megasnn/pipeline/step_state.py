"""The tensors that are alive during one step, from one action to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megasnn.kernels.spike_codec import bits_of, remember_bits
from megasnn.layers.weight_grad import Task
from megasnn.pipeline.edges import Entry, backward_of
from megasnn.pipeline.kept_input import KeptInput

Key = tuple[int, int]
"""(chunk, micro-batch)."""


@dataclass(frozen=True)
class MicroBatchInput:
    """What the executor needs of a micro-batch; images only where the first chunk is, labels where the last one is.

    Attributes:
        images: what the model's first layer takes, `[n, C, H, W]`, `[T, n, C, H, W]` or `[n, T, C, H, W]`.
        labels: class indices `[n]` or `[n, 1]`, or probabilities `[n, classes]`.
        size: n, known on every stage.
        samples: positions of the samples in the whole training, for dropout; see KeyedLayer.
        goes_on: whether this is a later window of the samples of the micro-batch before: neurons go on from the state
            that it left. A chunk's forwards are in ascending order in every schedule, as its validation proves.
        is_padding: whether it only keeps this replica in step with others, in evaluation; nobody is told of its output.
    """

    images: Tensor | None
    labels: Tensor | None
    size: int
    samples: range | None = None
    goes_on: bool = False
    is_padding: bool = False


@dataclass
class StepState:
    """Inputs, outputs, graphs and gradients of one step, by chunk and micro-batch; each goes when it is used up.

    Attributes:
        micro_batches: images and labels. anchor: makes a chunk's input part of a graph.
        repeated: the forwards that are computed again. kept: what these are computed from.
        inputs: of chunks whose forward is to come. outputs: what is to be sent to the next chunk.
        learning: which of the tensors that a chunk hands on require a gradient, by their places.
        backwards: of chunks whose forward is done; None where there is nothing to learn.
        gradients: of those tensors of a chunk's output, for its backward.
        awaited: of the inputs that require a gradient, without values, until that is there.
        weight_gradients: what backwards of input gradients have left.
        losses: of micro-batches, without graph.
    """

    micro_batches: Sequence[MicroBatchInput]
    anchor: Tensor
    repeated: frozenset[Key] = frozenset()
    kept: dict[Key, KeptInput] = field(default_factory=dict)
    learning: dict[Key, list[int]] = field(default_factory=dict)
    inputs: dict[Key, list[Tensor]] = field(default_factory=dict)
    outputs: dict[Key, list[Tensor]] = field(default_factory=dict)
    backwards: dict[Key, Callable[[], None] | None] = field(default_factory=dict)
    gradients: dict[Key, Sequence[Tensor]] = field(default_factory=dict)
    awaited: dict[Key, Sequence[Tensor]] = field(default_factory=dict)
    weight_gradients: dict[Key, list[Task]] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)

    def images(self, micro_batch: int) -> Tensor:
        images = self.micro_batches[micro_batch].images
        assert images is not None
        return images

    def labels(self, micro_batch: int) -> Tensor:
        labels = self.micro_batches[micro_batch].labels
        assert labels is not None
        return labels

    def entered(self, key: Key) -> list[Tensor]:
        """The inputs of a chunk behind the first, which begin its graph and are here no longer."""
        chunk, micro_batch = key
        xs = self.inputs.pop(key)
        learning = [index for index, x in enumerate(xs) if x.requires_grad]
        self.learning[chunk - 1, micro_batch] = learning
        if not torch.is_grad_enabled() or not learning:
            self.gradients[chunk - 1, micro_batch] = ()
            return xs

        def deliver(gradients: Sequence[Tensor]) -> None:
            self.gradients[chunk - 1, micro_batch] = gradients

        self.awaited[key] = [torch.empty_like(xs[index], device="meta") for index in learning]
        entered = Entry.apply(self.anchor, deliver, *(xs[index].detach() for index in learning))
        for index, x in zip(learning, entered, strict=True):
            xs[index] = remember_bits(x, bits_of(xs[index]))
        return xs

    def await_gradients(self, key: Key, y: Sequence[Tensor]) -> None:
        """Backward starts from the edges of the graph; the values are needed by the next chunk only."""
        learning = [each for each in y if each.requires_grad]
        self.learning[key] = [index for index, each in enumerate(y) if each.requires_grad]
        self.backwards[key] = backward_of(learning, partial(self.gradients.pop, key)) if learning else None

    def backward(self, key: Key) -> None:
        backward = self.backwards.pop(key)
        if backward is None:  # a chunk may have nothing to learn
            self.gradients.pop(key, None)
        else:
            backward()
        awaited, before = self.awaited.pop(key, ()), (key[0] - 1, key[1])
        if awaited and before not in self.gradients:  # nothing with a derivative has led to its inputs
            self.gradients[before] = [torch.zeros_like(each, device=self.anchor.device) for each in awaited]
