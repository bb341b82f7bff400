"""QKFormer (arXiv 2403.16552) in the form of SpikingJelly 2.0.0's `model.qkformer`, natively sharded.

Three stages, each with half the height and width and twice the channels of the one before. In the first two, attention
is a mask of tokens, made of q alone; in the last it is Spikformer's. For small images the patch embeddings are those of
the authors' CIFAR model, which SpikingJelly lacks.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from megasnn.layers import ConvNormNeuron, MeanLinear, SpikingSelfAttention, TokenAttention
from megasnn.layers.unit import Residual
from megasnn.models.layer import Layer, layer
from megasnn.models.qkformer.dimensions import STAGES, QKFormer


def layers_of(model: QKFormer) -> Iterable[Layer]:
    """Of each stage its patch embedding and the halves of its blocks; the head."""
    inputs = model.in_channels
    embedding = PatchEmbedding if model.patch_embedding == "imagenet" else SmallPatchEmbedding
    stages = zip(model.dims, model.of_stages("depths"), model.of_stages("num_heads"), strict=True)
    for number, (dim, depth, heads) in enumerate(stages, start=1):
        yield layer(f"patch_embed{number}", embedding(inputs, dim, begins=number == 1))
        attention = SpikingSelfAttention if number == STAGES else TokenAttention
        for block in range(depth):
            name = f"stage{number}.{block}"
            yield layer(f"{name}.attention", Residual(attention(dim, heads)), unit=name)
            yield layer(f"{name}.mlp", MLP(dim, int(dim * model.mlp_ratio)), unit=name)
        inputs = dim
    yield layer("head", MeanLinear(inputs, model.num_classes))


class PatchEmbedding(nn.Module):
    """Units that halve height and width, beside a shortcut that does it at once; the first stage halves twice."""

    def __init__(self, inputs: int, outputs: int, begins: bool) -> None:
        super().__init__()
        self.begin = ConvNormNeuron(inputs, outputs // 2, 3, bias=True, max_pool=True) if begins else None
        middle = outputs // 2 if begins else inputs
        self.down = ConvNormNeuron(middle, outputs, 3, bias=True, max_pool=True)
        self.last = ConvNormNeuron(outputs, outputs, 3, bias=True)
        self.shortcut = ConvNormNeuron(middle, outputs, bias=True, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.begin is None else self.begin(x)
        return self.last(self.down(x)) + self.shortcut(x)


class SmallPatchEmbedding(nn.Module):
    """Units beside a shortcut, without biases: the first stage keeps height and width, the others halve them in their
    last unit. Attributes have the names of PatchEmbedding's, by which weights are known."""

    def __init__(self, inputs: int, outputs: int, begins: bool) -> None:
        super().__init__()
        self.begin = ConvNormNeuron(inputs, outputs // 2, 3) if begins else None
        middle = outputs // 2 if begins else inputs
        self.down = ConvNormNeuron(middle, outputs, 3)
        self.last = None if begins else ConvNormNeuron(outputs, outputs, 3, max_pool=True)
        self.shortcut = ConvNormNeuron(middle, outputs, stride=1 if begins else 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.begin is None else self.begin(x)
        y = self.down(x)
        return (y if self.last is None else self.last(y)) + self.shortcut(x)


class MLP(nn.Module):
    """x + fc2(fc1(x)), pointwise over tokens."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = ConvNormNeuron(dim, hidden, pointwise=True, bias=True)
        self.fc2 = ConvNormNeuron(hidden, dim, pointwise=True, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.fc1(x))
