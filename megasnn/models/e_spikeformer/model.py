"""E-SpikeFormer (Spike-driven Transformer V3, arXiv 2411.16061) as published: dimensions and layers.

Published: github.com/BICLab/Spike-Driven-Transformer-V3, `Classification/Model_Base/models.py`.

Equal weights give equal logits and gradients with one time step. The authors' neuron has no memory and rounds its input
to 0 to 4, like an integer LIF in its first step. Over several steps potentials go on here.

Left out: larger models (`Model_Large`, autoencoder pretraining), distillation, and single spikes for chips.
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

FIRST_WITH_ATTENTION = 3
"""Number of the first stage with attention, counted from 0. The stages before it have 1, 1 and 2 blocks."""
LAST = 4
"""Number of the last stage, the only one that keeps height and width."""


@config_dataclass(frozen=True, config=STRICT)
class IntegerNeuronConfig(NeuronConfig):
    """Defaults of the authors' integer LIF."""

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
    """Channels of the four stages. 5 million parameters: 32,64,128,192; 19 million: 64,128,256,360."""
    depths: str = "6,2"
    """Number of blocks in each of the last two stages, which have attention."""
    num_heads: Size = 8
    """Attention heads, divided among the tensor-parallel ranks."""
    mlp_ratio: Positive = 4.0
    """Hidden channels of the MLP, in multiples of the stage's channels."""
    image_size: Size = 224
    num_classes: Size = 1000
    time_steps: Size = 1

    def problems(self, tensor_parallel: int) -> list[str]:
        wrong = super().problems(tensor_parallel)
        wrong += refusal(parse_numbers, "embed_dims", self.embed_dims, 4)
        wrong += refusal(parse_numbers, "depths", self.depths, 2)
        if not wrong and parse_numbers("embed_dims", self.embed_dims, 4)[0] % 2:
            wrong.append(f'--embed-dims "{self.embed_dims}" must begin with an even number, whose half the stem has')
        return wrong

    def layers(self) -> Iterable[Layer]:
        from megasnn.layers.layer import layer
        from megasnn.models.e_spikeformer import blocks as e

        first, second, third, last = parse_numbers("embed_dims", self.embed_dims, 4)
        dims = (first // 2, first, second, third, last)
        depths = (1, 1, 2, *parse_numbers("depths", self.depths, 2))
        inputs = self.in_channels
        # The published blocks take stochastic depth and layer scale, but apply neither.
        for stage, (dim, depth) in enumerate(zip(dims, depths, strict=True)):
            attends = stage >= FIRST_WITH_ATTENTION
            if stage == 0:
                yield layer("downsample.0", e.ConvNorm(inputs, dim, 7, stride=2, bias=True))
            else:
                stride = 1 if stage == LAST else 2
                yield layer(f"downsample.{stage}", e.CountConvNorm(inputs, dim, 3, stride=stride, bias=True))
            depthwise_size = 3 if attends else 7
            wide: dict[str, Any] = {"dims": 1, "bias": True} if attends else {"kernel_size": 3}
            for block in range(depth):
                name = f"stage{stage}.{block}"
                yield layer(f"{name}.separable", e.SeparableConv(dim, depthwise_size), layer_group=name)
                if attends:
                    yield layer(f"{name}.attention", e.CountAttention(dim, self.num_heads), layer_group=name)
                yield layer(f"{name}.mlp", e.MLP(dim, int(dim * self.mlp_ratio), **wide), layer_group=name)
            inputs = dim
        yield layer("head", e.Head(inputs, self.num_classes))
