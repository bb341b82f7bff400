"""Patch embedding of QKFormer."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from megasnn.layers import ConvNormNeuron


class PatchEmbedding(nn.Module):
    """Units that halve height and width, beside a shortcut that does it at once; the first stage halves twice.

    Args:
        begins: whether it is the first stage's, which has a unit more.
        small: for small images: without biases, the first stage keeps height and width, the others halve them in their
            last unit.
    """

    def __init__(self, inputs: int, outputs: int, begins: bool, small: bool) -> None:
        super().__init__()
        conv_norm_neuron = partial(ConvNormNeuron, kernel_size=3, bias=not small)
        middle = outputs // 2 if begins else inputs
        self.begin = conv_norm_neuron(inputs, middle, max_pool=not small) if begins else None
        self.down = conv_norm_neuron(middle, outputs, max_pool=not small)
        self.last = None if begins and small else conv_norm_neuron(outputs, outputs, max_pool=small)
        self.shortcut = ConvNormNeuron(middle, outputs, bias=not small, stride=1 if begins and small else 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.begin is None else self.begin(x)
        y = self.down(x)
        return (y if self.last is None else self.last(y)) + self.shortcut(x)
