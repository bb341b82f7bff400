"""The VGG for event cameras in the form of SpikingJelly 2.0.0's `CIFAR10DVSVGG`, natively sharded.

Same weights in, same logits and gradients out. Event frames `[N, T, C, H, W]` go in, spikes `[T, N, C_local, H, W]` go
from layer to layer, cut by channel. Average pooling would turn a spike into a quarter: so the layer behind it pools
what it receives, and spikes are what travels between ranks and is kept for backward.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from megasnn.comm.codec import Wire
from megasnn.kernels import NeuronSpec
from megasnn.kernels.pooling import average_pool
from megasnn.layers import (
    BuildContext,
    ConvNormNeuron,
    KeyedLayer,
    ParallelBatchNorm,
    ParallelConv,
    ParallelDropout,
    ParallelLinear,
)
from megasnn.layers.conv import Style, cheaper_style
from megasnn.layers.neuron import build_neuron
from megasnn.models.description import LayerDescription, ModelDescription
from megasnn.models.event_block import EventBlock
from megasnn.models.vgg_dvs.dimensions import VggDvsConfig
from megasnn.sharding import Initialiser

KERNEL = 3
POOL = 2


def describe_vgg_dvs(config: VggDvsConfig, neuron: NeuronSpec) -> ModelDescription:
    """The layers of a configuration: each convolution with its norm and neurons, then the classifier."""
    *convolutions, last = config.layers()
    layers = [
        LayerDescription(layer.name, layer.unit, partial(_block, config, neuron, index), Wire.SPIKES)
        for index, layer in enumerate(convolutions)
    ]
    layers.append(LayerDescription(last.name, last.unit, partial(_classifier, config), Wire.DENSE))
    return ModelDescription(tuple(layers), config.time_steps, _input_shape(config), config.num_classes)


class Classifier(KeyedLayer):
    """Average pooling, dropout, and a linear layer on all that is left: spikes -> logits `[T, N, num_classes]`.

    Features are ordered by channel, so a rank's channels are a run of the weight's columns.
    """

    def __init__(self, pool: int, dropout: ParallelDropout, linear: ParallelLinear) -> None:
        super().__init__()
        self.pool, self.dropout, self.linear = pool, dropout, linear

    def forward(self, x: Tensor, samples: range | None = None) -> Tensor:
        pooled = average_pool(x.flatten(0, 1), self.pool).unflatten(0, x.shape[:2])
        return self.linear(self.dropout(pooled.flatten(2), samples))


def _input_shape(config: VggDvsConfig) -> tuple[int, ...]:
    return config.time_steps, config.in_channels, config.image_size, config.image_size


def _block(config: VggDvsConfig, neuron: NeuronSpec, index: int, context: BuildContext) -> nn.Module:
    block, first = config.blocks[index], index == 0
    inputs = config.in_channels if first else config.blocks[index - 1].channels
    conv = ParallelConv(
        inputs,
        block.channels,
        KERNEL,
        context,
        initialise=_kaiming_normal,
        initialise_bias=_uniform(inputs * KERNEL**2),
        style=_style(config, index, inputs, block.channels),
        padding=KERNEL // 2,
        bias=True,
        whole_input=first,
        wire=Wire.DENSE if first else Wire.SPIKES,
        pool=POOL if block.pool else 1,
    )
    norm = ParallelBatchNorm(block.channels, context)
    if not first:
        return ConvNormNeuron(conv, norm, build_neuron(neuron, context))
    return EventBlock(conv, norm, build_neuron(neuron, context), input_shape=_input_shape(config))


def _style(config: VggDvsConfig, index: int, inputs: int, outputs: int) -> Style:
    if index == 0:
        return "column"  # every rank has the frames whole
    if config.tensor_parallel_style == "alternate":
        return "row" if index % 2 else "column"
    return cheaper_style(inputs, outputs)


def _classifier(config: VggDvsConfig, context: BuildContext) -> nn.Module:
    features = config.blocks[-1].channels * config.final_size**2
    initialise = _uniform(features)
    return Classifier(
        POOL if config.final_pool else 1,
        ParallelDropout(config.dropout, "classifier.dropout", context),
        ParallelLinear(features, config.num_classes, context, initialise=initialise, initialise_bias=initialise),
    )


def _kaiming_normal(tensor: Tensor, generator: torch.Generator) -> None:
    nn.init.kaiming_normal_(tensor, mode="fan_out", nonlinearity="relu", generator=generator)


def _uniform(fan_in: int) -> Initialiser:
    """What torch gives linear layers and all biases: uniform within +-1 / sqrt(fan_in)."""
    bound = 1 / math.sqrt(fan_in)

    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        tensor.uniform_(-bound, bound, generator=generator)

    return fill
