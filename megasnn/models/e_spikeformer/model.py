"""E-SpikeFormer (Spike-driven Transformer V3, arXiv 2411.16061) in the form of the code published with it
(github.com/BICLab/Spike-Driven-Transformer-V3, `Classification/Model_Base/models.py`): its dimensions and layers.

Same weights in, same logits and gradients out, with one time step. The authors' neuron has no memory: it rounds its
input to 0 to 4, which is what an integer LIF does in its first step. With several time steps potentials go on.

Not here: the larger models that an autoencoder pretrains (`Model_Large`), the distillation from a teacher in the
published training script, which is a loss and no part of the model, and the single spikes that counts become on a chip.
Stochastic depth and layer scale are arguments of the published blocks, and these do not apply them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic.dataclasses import dataclass as config_dataclass

from megasnn.common.files import STRICT
from megasnn.config.checks import Positive, Size, parse_numbers, refusal
from megasnn.config.neuron import NeuronConfig
from megasnn.kernels import NEURONS
from megasnn.models.model import Model

if TYPE_CHECKING:
    from megasnn.layers.layer import Layer

FIRST_WITH_ATTENTION, LAST = 3, 4
"""Of the stages, which count from 0. Those before have 1, 1 and 2 blocks; all but the last halve height and width."""


@config_dataclass(frozen=True, config=STRICT)
class IntegerNeuronConfig(NeuronConfig):
    """Defaults are the authors' integer LIF."""

    neuron: Annotated[str, NEURONS] = "ilif4"
    tau: Positive = 4 / 3
    v_reset: float | None = None
    decay_input: bool = False
    detach_reset: bool = False


@dataclass(frozen=True, kw_only=True)
class ESpikeFormer(Model):
    """E-SpikeFormer's dimensions (arXiv 2411.16061); the defaults are the model of 10 million parameters."""

    name = "e_spikeformer"
    marker = "stage0.0.separable.depthwise.conv.weight"
    neuron: ClassVar[type[NeuronConfig]] = IntegerNeuronConfig

    embed_dims: str = "48,96,192,240"
    """Channels of the four stages: 32,64,128,192 is the model of 5 million parameters, 64,128,256,360 that of 19."""
    depths: str = "6,2"
    """Blocks with attention of the last two stages."""
    num_heads: Size = 8
    """Attention heads, shared out over the tensor parallel ranks."""
    mlp_ratio: Positive = 4.0
    """Hidden channels of the MLP, in multiples of the stage's channels."""
    image_size: Size = 224
    num_classes: Size = 1000
    time_steps: Size = 1

    def problems(self, tensor_parallel: int) -> list[str]:
        wrong = super().problems(tensor_parallel)
        wrong += refusal(parse_numbers, "embed_dims", self.embed_dims, 4) + refusal(
            parse_numbers, "depths", self.depths, 2
        )
        if not wrong and parse_numbers("embed_dims", self.embed_dims, 4)[0] % 2:
            wrong.append(f'--embed-dims "{self.embed_dims}" must begin with an even number, whose half the stem has')
        return wrong

    def layers(self) -> Iterable[Layer]:
        """The downsampling before each stage, the halves or thirds of its blocks, the head."""
        from megasnn.layers.layer import layer
        from megasnn.models.e_spikeformer import blocks as e

        first, second, third, last = parse_numbers("embed_dims", self.embed_dims, 4)
        dims, depths = (first // 2, first, second, third, last), (1, 1, 2, *parse_numbers("depths", self.depths, 2))
        inputs = self.in_channels
        for stage, (dim, depth) in enumerate(zip(dims, depths, strict=True)):
            down, sizes, attends = f"downsample.{stage}", (inputs, dim), stage >= FIRST_WITH_ATTENTION
            if stage == 0:
                yield layer(down, e.ConvNorm(*sizes, 7, stride=2, bias=True))
            else:
                yield layer(down, e.CountConvNorm(*sizes, 3, stride=1 if stage == LAST else 2, bias=True))
            wide: dict[str, Any] = {"dims": 1, "bias": True} if attends else {"kernel_size": 3}
            for block in range(depth):
                name = f"stage{stage}.{block}"
                yield layer(f"{name}.separable", e.SeparableConv(dim, 3 if attends else 7), layer_group=name)
                if attends:
                    yield layer(f"{name}.attention", e.CountAttention(dim, self.num_heads), layer_group=name)
                yield layer(f"{name}.mlp", e.MLP(dim, int(dim * self.mlp_ratio), **wide), layer_group=name)
            inputs = dim
        yield layer("head", e.Head(inputs, self.num_classes))
