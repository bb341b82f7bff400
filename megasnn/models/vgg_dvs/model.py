"""The VGG for event cameras in the form of SpikingJelly 2.0.0's `CIFAR10DVSVGG`: its dimensions, neuron and layers.

Same weights in, same logits and gradients out. Average pooling would turn a spike into a quarter: so the layer
behind it pools what it receives, and spikes are what travels between ranks and is kept for backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic.dataclasses import dataclass as config_dataclass

from megasnn.config.checks import refusal
from megasnn.config.fields import ShareBelowOne, Size
from megasnn.config.neuron import NeuronConfig, Surrogate
from megasnn.config.pretrain import SAME_FUNCTION
from megasnn.files import STRICT
from megasnn.models.model import Model

if TYPE_CHECKING:
    from torch import Tensor

    from megasnn.layers.conv import Style
    from megasnn.models.layer import Layer

POOL = "P"
CIFAR10_DVS = "64,128,P,256,256,P,512,512,P,512,512,P"


@dataclass(frozen=True)
class VggBlock:
    """A convolution with so many output channels, behind average pooling 2 x 2 or not."""

    channels: int
    pool: bool


def parse_channels(text: str) -> tuple[tuple[VggBlock, ...], bool]:
    """The blocks that "64,128,P,256" describes, and whether a pooling comes after the last one.

    Raises:
        ValueError: something else than channel numbers and single poolings between them, or no block at all.
    """
    blocks: list[VggBlock] = []
    pool = False
    for place, word in enumerate(part.strip() for part in text.split(",")):
        if word.upper() == POOL:
            if pool:
                raise ValueError(f'--channels "{text}": two poolings in a row, the second at place {place + 1}')
            pool = True
        elif word.isdecimal() and int(word) > 0:
            blocks.append(VggBlock(int(word), pool))
            pool = False
        else:
            raise ValueError(
                f'--channels "{text}": {word!r} at place {place + 1} is neither a number of channels nor {POOL} for '
                f'pooling; the default is "{CIFAR10_DVS}"'
            )
    if not blocks:
        raise ValueError(f'--channels "{text}" has no convolution; the default is "{CIFAR10_DVS}"')
    return tuple(blocks), pool


@config_dataclass(frozen=True, config=STRICT)
class VggNeuronConfig(NeuronConfig):
    """Defaults are those of SpikingJelly's CIFAR10DVSVGG."""

    tau: float = 1.333
    """Membrane time constant of lif in time steps; of plif, the initial one."""
    decay_input: bool = False
    """Whether the input is divided by the time constant too."""
    surrogate: Surrogate = "atan"
    """Surrogate gradient of the spike."""


@dataclass(frozen=True, kw_only=True)
class VggDvs(Model):
    """The VGG of the event-camera literature; the defaults are SpikingJelly 2.0.0's CIFAR10DVSVGG."""

    name = "vgg_dvs"
    marker = "classifier.linear.weight"
    neuron: ClassVar[type[NeuronConfig]] = VggNeuronConfig

    channels: str = CIFAR10_DVS
    """Output channels of each convolution, with P where average pooling 2 x 2 comes between them."""
    image_size: Size = 48
    """Height and width of the frames."""
    in_channels: Size = 2
    """Channels of the frames: one for each polarity."""
    time_steps: Size = 10
    """Frames of a sample, T: one at each simulated time step."""
    dropout: ShareBelowOne = 0.25
    """Share of the classifier's inputs that are left out in training, drawn anew for each sample and time step."""
    tensor_parallel_style: Literal["auto", "alternate"] = field(default="auto", metadata=SAME_FUNCTION)
    """How convolutions are cut over the tensor parallel ranks: auto takes for each one, by column (its outputs) or by
    row (its inputs), what moves fewer bytes; alternate takes one after the other, as Megatron-LM does."""

    @property
    def blocks(self) -> tuple[VggBlock, ...]:
        """Raises ValueError for malformed channels."""
        return parse_channels(self.channels)[0]

    @property
    def final_pool(self) -> bool:
        """Tells whether the classifier pools its input."""
        return parse_channels(self.channels)[1]

    @property
    def final_size(self) -> int:
        """Height and width of what the classifier sees."""
        return self.image_size // 2 ** (sum(block.pool for block in self.blocks) + self.final_pool)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.time_steps, self.in_channels, self.image_size, self.image_size

    def from_spikingjelly(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        from megasnn.models.vgg_dvs.weight_names import vgg_from_spikingjelly

        return vgg_from_spikingjelly(state_dict, [block.pool for block in self.blocks])

    def problems(self, tensor_parallel: int) -> list[str]:
        wrong = super().problems(tensor_parallel)
        wrong += refusal(parse_channels, self.channels)
        if wrong:
            return wrong
        if self.in_channels != 2:
            wrong.append(f"--in-channels {self.in_channels}: event frames have two polarities; set 2, or leave it out")
        if self.final_size < 1:
            pools = sum(block.pool for block in self.blocks) + self.final_pool
            wrong.append(
                f'--image-size {self.image_size} is too small for the {pools} poolings of --channels "{self.channels}"'
            )
        if tensor_parallel == 1 and self.tensor_parallel_style != "auto":
            wrong.append(
                f"--tensor-parallel-style {self.tensor_parallel_style} needs --tensor-model-parallel-size above 1"
            )
        return wrong

    def layers(self) -> Iterable[Layer]:
        """Each convolution with its norm and neurons, then the classifier."""
        from megasnn.layers import ConvNormNeuron
        from megasnn.layers.init import kaiming_normal
        from megasnn.models.layer import layer
        from megasnn.models.vgg_dvs.blocks import Classifier

        channels, alternate = self.in_channels, self.tensor_parallel_style == "alternate"
        for index, block in enumerate(self.blocks):
            # Every rank has the frames whole, so that the first convolution is cut by columns.
            style: Style | None = "column" if index == 0 else ("column", "row")[index % 2] if alternate else None
            unit = ConvNormNeuron(
                channels,
                block.channels,
                kernel_size=3,
                bias=True,
                average_pool=2 if block.pool else 1,
                initialise=kaiming_normal,
                style=style,
            )
            yield layer(f"features.{index}", unit)
            channels = block.channels
        features, pool = channels * self.final_size**2, 2 if self.final_pool else 1
        yield layer("classifier", Classifier(features, self.num_classes, pool, self.dropout))
