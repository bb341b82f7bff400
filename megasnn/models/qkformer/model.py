"""QKFormer (arXiv 2403.16552) in the form of SpikingJelly 2.0.0's `model.qkformer`, natively sharded.

Three stages, each with half the height and width and twice the channels of the one before. In the first two, attention
is a mask of tokens, made of q alone; in the last it is Spikformer's. For small images the patch embeddings are those of
the authors' CIFAR model, which SpikingJelly lacks.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import Tensor, nn

from megasnn.layers import ConvNormNeuron, MeanLinear, SpikingSelfAttention, TokenAttention
from megasnn.layers.unit import Residual, ResidualMLP
from megasnn.models.layer import Layer, layer
from megasnn.models.qkformer.dimensions import STAGES, QKFormer


def layers_of(model: QKFormer) -> Iterable[Layer]:
    """Of each stage its patch embedding and the halves of its blocks; the head."""
    inputs = model.in_channels
    small = model.patch_embedding == "cifar"
    stages = zip(model.dims, model.of_stages("depths"), model.of_stages("num_heads"), strict=True)
    for number, (dim, depth, heads) in enumerate(stages, start=1):
        yield layer(f"patch_embed{number}", PatchEmbedding(inputs, dim, begins=number == 1, small=small))
        attention = SpikingSelfAttention if number == STAGES else TokenAttention
        for block in range(depth):
            name = f"stage{number}.{block}"
            yield layer(f"{name}.attention", Residual(attention(dim, heads)), unit=name)
            yield layer(f"{name}.mlp", ResidualMLP(dim, int(dim * model.mlp_ratio), bias=True), unit=name)
        inputs = dim
    yield layer("head", MeanLinear(inputs, model.num_classes))


class PatchEmbedding(nn.Module):
    """Units that halve height and width, beside a shortcut that does it at once; the first stage halves twice.

    Args:
        begins: whether it is the first stage's, which has a unit more.
        small: for small images: without biases, the first stage keeps height and width, the others halve them in their
            last unit.
    """

    def __init__(self, inputs: int, outputs: int, begins: bool, small: bool) -> None:
        super().__init__()
        unit = partial(ConvNormNeuron, kernel_size=3, bias=not small)
        middle = outputs // 2 if begins else inputs
        self.begin = unit(inputs, middle, max_pool=not small) if begins else None
        self.down = unit(middle, outputs, max_pool=not small)
        self.last = None if begins and small else unit(outputs, outputs, max_pool=small)
        self.shortcut = ConvNormNeuron(middle, outputs, bias=not small, stride=1 if begins and small else 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.begin is None else self.begin(x)
        y = self.down(x)
        return (y if self.last is None else self.last(y)) + self.shortcut(x)
