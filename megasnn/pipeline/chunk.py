"""A contiguous run of layers that one pipeline rank owns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megasnn.comm.codec import Content
from megasnn.layers.context import BuildContext
from megasnn.layers.neuron import NeuronLayer
from megasnn.layers.weight_gradients import WeightGradients
from megasnn.layers.whole import apply_layer
from megasnn.models.description import ModelDescription, frames_of
from megasnn.sharding import ShardedTensor, materialise, sharded_tensors


class PipelineChunk(nn.Module):
    """Layers `start..end` of a model, in order. `len`, indexing and iteration go over the layers.

    A chunk without layers (legal in an explicit layout) hands its input on.

    Args:
        bounds: the layers of each chunk.
    Attributes:
        index: place among all chunks of the pipeline, from input to loss.
        is_first, is_last: whether it takes the images, and whether it gives the logits.
        output: what the last layer's output is known to hold.
        weight_gradients: where its layers leave the second part of their backward.
    """

    def __init__(self, model: ModelDescription, bounds: Sequence[range], index: int, context: BuildContext) -> None:
        super().__init__()
        span = bounds[index]
        self.index = index
        self.is_first, self.is_last = index == 0, index == len(bounds) - 1
        self.names = [model.layers[i].name for i in span]
        self.weight_gradients = WeightGradients()
        layers = model.build(replace(context, weight_gradients=self.weight_gradients))
        self.layers = nn.ModuleList(layers[i] for i in span)
        self._carrying = [each for each in self.layers.modules() if isinstance(each, NeuronLayer) and each.carries]
        # What crosses the boundary is the output of the last layer before it, in this chunk or an earlier one.
        self.output = model.layers[span.stop - 1].output if span.stop > 0 else Content.DENSE
        self._input_shape = model.input_shape

    def forward(self, x: Tensor, samples: range | None = None, goes_on: bool = False) -> Tensor:
        """
        Args:
            x: output of the chunk before; of the first chunk, images or frames as they are loaded.
            samples: see KeyedLayer.
            goes_on: whether this is a later window of the samples that the last forward was on (--bptt-steps).
        """
        if not goes_on:
            self.forget()
        if self.is_first:
            x = frames_of(x, self._input_shape)
        for layer in self.layers:
            x = apply_layer(layer, x, samples, goes_on)
        return x

    def forget(self) -> None:
        """Lets neurons forget the state that the last forward left."""
        for neuron in self._carrying:
            neuron.forget()

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        return zip(self.names, self.layers, strict=True)

    def sharded_tensors(self) -> list[ShardedTensor]:
        return list(sharded_tensors(self.named_layers()))

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> nn.Module:
        return self.layers[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.layers)


def build_chunk(
    model: ModelDescription,
    bounds: Sequence[range],
    index: int,
    context: BuildContext,
    device: torch.device,
    seed: int,
) -> PipelineChunk:
    """Builds chunk `index`: of all layers, only its own get memory, and keyed initial values."""
    chunk = PipelineChunk(model, bounds, index, context)
    materialise(chunk.named_layers(), device, seed)
    return chunk


def describe_tensors(model: ModelDescription, context: BuildContext) -> list[ShardedTensor]:
    """The description of every tensor of the whole model, on the meta device: nothing is allocated."""
    return list(sharded_tensors(model.named_layers(context)))
