"""The event-camera VGG as in SpikingJelly 2.0.0's `CIFAR10DVSVGG`: dimensions, neuron and layers.

Equal weights give equal logits and gradients.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic.dataclasses import dataclass as config_dataclass

from megasnn.common.files import STRICT
from megasnn.config.checks import FractionBelowOne, Size, refusal
from megasnn.config.neuron import NeuronConfig, SurrogateName
from megasnn.models.model import Model

if TYPE_CHECKING:
    from megasnn.layers.layer import Layer

CIFAR10_DVS = "64,128,P,256,256,P,512,512,P,512,512,P"


def parse_channels(text: str) -> tuple[list[tuple[int, bool]], bool]:
    """Parses convolutions like "64,128,P,256".

    Returns (channels, True after a pooling) by convolution, and True if a pooling follows the last.

    Raises:
        ValueError: anything but numbers of channels, each followed by at most one P.
    """
    if not re.fullmatch(r"[1-9]\d*(,P)?(,[1-9]\d*(,P)?)*", text):
        raise ValueError(
            f'--channels "{text}" must be numbers of channels, with P for a pooling between them, as the default '
            f'"{CIFAR10_DVS}"'
        )
    convolutions = []
    pool = False
    for word in text.split(","):
        if word != "P":
            convolutions.append((int(word), pool))
        pool = word == "P"
    return convolutions, pool


@config_dataclass(frozen=True, config=STRICT)
class VggNeuronConfig(NeuronConfig):
    """Defaults of SpikingJelly's CIFAR10DVSVGG."""

    tau: float = 1.333
    decay_input: bool = False
    surrogate: SurrogateName = "atan"


@dataclass(frozen=True, kw_only=True)
class VggDvs(Model):
    """The VGG of the event-camera literature; the defaults are SpikingJelly 2.0.0's CIFAR10DVSVGG."""

    name = "vgg_dvs"
    marker = "classifier.linear.weight"
    neuron: ClassVar[type[NeuronConfig]] = VggNeuronConfig

    channels: str = CIFAR10_DVS
    """Output channels of each convolution, and P for average pooling 2 x 2."""
    image_size: Size = 48
    in_channels: Size = 2
    """Channels of the frames, one for each polarity; 1 (grey) or 3 (RGB) for images."""
    event_frames: bool = True
    """Samples are recordings of event cameras; --no-event-frames takes images, shown at every time step."""
    time_steps: Size = 10
    """Frames of a sample, T, one for each simulated time step."""
    dropout: FractionBelowOne = 0.25
    """Probability to drop an input of the classifier in training, drawn for each sample and time step."""

    def problems(self, tensor_parallel: int) -> list[str]:
        wrong = super().problems(tensor_parallel)
        wrong += refusal(parse_channels, self.channels)
        pools = self.channels.count("P")
        if self.image_size < 2**pools:
            wrong.append(
                f'--image-size {self.image_size} is too small for the {pools} poolings of --channels "{self.channels}"'
            )
        return wrong

    def layers(self) -> Iterable[Layer]:
        from megasnn.layers import ConvNormNeuron
        from megasnn.layers.init import kaiming_normal
        from megasnn.layers.layer import layer
        from megasnn.models.vgg_dvs.blocks import Classifier

        convolutions, pools_last = parse_channels(self.channels)
        inputs = self.in_channels
        size = self.image_size
        for index, (channels, pools) in enumerate(convolutions):
            # Average pooling turns spikes into quarters. The next layer pools its own input, so that spikes travel
            # between ranks and are stored for backward.
            pool = 2 if pools else 1
            size //= pool
            conv_norm_neuron = ConvNormNeuron(
                inputs, channels, 3, bias=True, average_pool=pool, initialise=kaiming_normal
            )
            yield layer(f"features.{index}", conv_norm_neuron)
            inputs = channels
        pool = 2 if pools_last else 1
        features = inputs * (size // pool) ** 2
        yield layer("classifier", Classifier(features, self.num_classes, pool, self.dropout))
