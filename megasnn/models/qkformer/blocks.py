"""QKFormer's patch embedding."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from megasnn.layers import ConvNormNeuron


class PatchEmbedding(nn.Module):
    """Convolutions that halve height and width, and a strided shortcut; the first stage halves twice.

    Args:
        begins: the first stage, with one more convolution.
        small: small images: no biases, the first stage keeps height and width, others halve them in the last
            convolution.
    """

    def __init__(self, inputs: int, outputs: int, begins: bool, small: bool) -> None:
        super().__init__()
        # SpikingJelly's model for ImageNet has biases, the authors' for 32 x 32 images has none.
        conv_norm_neuron = partial(ConvNormNeuron, kernel_size=3, bias=not small)
        middle = outputs // 2 if begins else inputs
        keeps_size = begins and small
        stride = 1 if keeps_size else 2
        self.begin = conv_norm_neuron(inputs, middle, max_pool=not small) if begins else None
        self.down = conv_norm_neuron(middle, outputs, max_pool=not small)
        self.last = None if keeps_size else conv_norm_neuron(outputs, outputs, max_pool=small)
        self.shortcut = ConvNormNeuron(middle, outputs, bias=not small, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        if self.begin is not None:
            x = self.begin(x)
        y = self.down(x)
        if self.last is not None:
            y = self.last(y)
        return y + self.shortcut(x)
