"""A contiguous run of layers that one pipeline rank owns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megasnn.comm.codec import Wire
from megasnn.layers.context import BuildContext
from megasnn.layers.keyed import apply_layer
from megasnn.layers.weight_gradients import WeightGradients
from megasnn.models.description import LayerDescription, ModelDescription
from megasnn.sharding import ShardedTensor, materialise, sharded_tensors


class PipelineChunk(nn.Module):
    """Layers `start..end` of a model, in order. `len`, indexing and iteration go over the layers.

    A chunk without layers (legal in an explicit layout) hands its input on.

    Attributes:
        index: place among all chunks of the pipeline, from input to loss.
        is_first, is_last: whether it takes the images, and whether it gives the logits.
        output: what the last layer's output is known to hold.
        weight_gradients: where its layers leave the second part of their backward.
    """

    def __init__(
        self, index: int, chunks: int, descriptions: Sequence[LayerDescription], output: Wire, context: BuildContext
    ) -> None:
        super().__init__()
        self.index = index
        self.is_first, self.is_last = index == 0, index == chunks - 1
        self.names = [description.name for description in descriptions]
        self.weight_gradients = WeightGradients()
        context = replace(context, weight_gradients=self.weight_gradients)
        self.layers = nn.ModuleList(description.build(context) for description in descriptions)
        self.output = output

    def forward(self, x: Tensor, samples: range | None = None) -> Tensor:
        """`samples`: see KeyedLayer."""
        for layer in self.layers:
            x = apply_layer(layer, x, samples)
        return x

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
    """Builds chunk `index` only: describes its layers, then gives their tensors memory and keyed initial values."""
    span = bounds[index]
    # What crosses the boundary is the output of the last layer before it, in this chunk or an earlier one.
    output = model.layers[span.stop - 1].output if span.stop > 0 else Wire.DENSE
    chunk = PipelineChunk(index, len(bounds), [model.layers[i] for i in span], output, context)
    materialise(chunk.named_layers(), device, seed)
    return chunk


def describe_tensors(model: ModelDescription, context: BuildContext) -> list[ShardedTensor]:
    """The description of every tensor of the whole model, on the meta device: nothing is allocated."""
    return list(sharded_tensors((layer.name, layer.build(context)) for layer in model.layers))
