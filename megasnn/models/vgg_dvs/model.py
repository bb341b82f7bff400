"""The VGG for event cameras in the form of SpikingJelly 2.0.0's `CIFAR10DVSVGG`, natively sharded.

Same weights in, same logits and gradients out. Event frames `[N, T, C, H, W]` go in, spikes `[T, N, C_local, H, W]` go
from layer to layer, cut by channel. Average pooling would turn a spike into a quarter: so the layer behind it pools
what it receives, and spikes are what travels between ranks and is kept for backward.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from megasnn.kernels.convolution import average_pool
from megasnn.layers import ConvNormNeuron, KeyedLayer, ParallelDropout, ParallelLinear, WholeImages
from megasnn.layers.conv import Style
from megasnn.layers.initialisers import kaiming_normal
from megasnn.models.layer import Layer, layer
from megasnn.models.vgg_dvs.dimensions import VggDvs

POOL = 2


def layers_of(model: VggDvs) -> Iterable[Layer]:
    """Each convolution with its norm and neurons, then the classifier."""
    channels = model.in_channels
    for index, block in enumerate(model.blocks):
        unit = ConvNormNeuron(
            channels,
            block.channels,
            kernel_size=3,
            bias=True,
            average_pool=POOL if block.pool else 1,
            initialise=kaiming_normal,
            style=_style(model, index),
        )
        yield layer(f"features.{index}", unit)
        channels = block.channels
    features = channels * model.final_size**2
    yield layer("classifier", Classifier(features, model.num_classes, POOL if model.final_pool else 1, model.dropout))


def _style(model: VggDvs, index: int) -> Style | None:
    """Of the convolution with this number. Every rank has the frames whole, so that the first one is cut by columns."""
    if index == 0:
        return "column"
    if model.tensor_parallel_style == "alternate":
        return "row" if index % 2 else "column"
    return None


class Classifier(KeyedLayer):
    """Average pooling, dropout, and a linear layer on all that is left: spikes -> logits `[T, N, num_classes]`.

    Features are ordered by channel, so a rank's channels are a run of the weight's columns.
    """

    def __init__(self, features: int, num_classes: int, pool: int, dropout: float) -> None:
        super().__init__()
        self.pool, self.dropout = pool, ParallelDropout(dropout, "classifier.dropout")
        self.linear, self.whole_images = ParallelLinear(features, num_classes), WholeImages()

    def forward(self, x: Tensor, samples: range | None = None) -> Tensor:
        x = self.whole_images(x)
        pooled = average_pool(x.flatten(0, 1), self.pool).unflatten(0, x.shape[:2])
        pooled = self.whole_images.used(pooled, self.pool)
        return self.linear(self.dropout(pooled.flatten(2), samples))
