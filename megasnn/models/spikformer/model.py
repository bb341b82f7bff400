"""Spikformer (arXiv 2209.15425) in the form of SpikingJelly 2.0.0's `model.spikformer`, natively sharded.

Same weights in, same logits and gradients out. Between layers the stream is `[T, N, C, H, W]`: spikes inside the patch
stem, after it sums of spikes, which are at most 2 + 2 * depth. All layers are cut by channel, so what a rank holds of
the stream is its own channels, and residual additions are local.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from megasnn.comm.codec import Wire
from megasnn.kernels import NeuronSpec
from megasnn.layers import (
    BuildContext,
    ConvNormNeuron,
    ParallelBatchNorm,
    ParallelConv,
    ParallelLinear,
    SpikingSelfAttention,
)
from megasnn.layers.conv import cheaper_style
from megasnn.layers.neuron import build_neuron
from megasnn.models.description import LayerDescription, ModelDescription
from megasnn.models.event_block import EventBlock
from megasnn.models.spikformer.dimensions import STEM_STAGES, SpikformerConfig

ATTENTION_THRESHOLD = 0.5


def describe_spikformer(config: SpikformerConfig, neuron: NeuronSpec) -> ModelDescription:
    """The layers of a resolved configuration: how each is built, and what its output holds."""
    dim, hidden = config.embed_dim, config.mlp_dim
    builders: dict[str, tuple[Callable[[BuildContext], nn.Module], Wire]] = {
        "positional_encoding": (partial(_positional_encoding, dim, neuron), Wire.COUNTS),
        "attention": (partial(_attention, dim, config.num_heads, neuron), Wire.COUNTS),
        "mlp": (partial(_mlp, dim, hidden, neuron), Wire.COUNTS),
        "": (partial(Head, dim, config.num_classes), Wire.DENSE),  # the head, the only part of its unit
    }
    for stage in range(STEM_STAGES):
        builders[f"stages.{stage}"] = partial(_stem_stage, config, neuron, stage), Wire.SPIKES
    layers = tuple(LayerDescription(layer.name, layer.unit, *builders[layer.part]) for layer in config.layers())
    return ModelDescription(layers, config.time_steps, config.input_shape, config.num_classes)


class ImageStage(ConvNormNeuron):
    """The first stem stage: images `[N, C, H, W]`, shown at every step, or sequences `[T, N, C, H, W]`."""

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim not in (4, 5):
            raise ValueError(f"expected images [N, C, H, W] or sequences [T, N, C, H, W], got shape {list(x.shape)}")
        return super().forward(x.unsqueeze(0) if x.ndim == 4 else x)


class PositionalEncoding(ConvNormNeuron):
    """x + neuron(norm(conv(x))): the convolution that tells tokens apart by their place."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class AttentionHalf(SpikingSelfAttention):
    """The first half of a block: x + attention(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class MLPHalf(nn.Module):
    """The second half of a block: x + fc2(fc1(x)), pointwise over tokens."""

    def __init__(self, fc1: ConvNormNeuron, fc2: ConvNormNeuron) -> None:
        super().__init__()
        self.fc1, self.fc2 = fc1, fc2

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.fc1(x))


class Head(ParallelLinear):
    """Mean over the tokens, then a linear layer: `[T, N, C_local, H, W]` -> logits `[T, N, num_classes]`."""

    def __init__(self, dim: int, num_classes: int, context: BuildContext) -> None:
        super().__init__(dim, num_classes, context, initialise=trunc_normal)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(3).mean(dim=-1))


def trunc_normal(tensor: Tensor, generator: torch.Generator) -> None:
    """Spikformer's initial weights: normal with standard deviation 0.02, cut at +-2."""
    nn.init.trunc_normal_(tensor, std=0.02, generator=generator)


def _stem_stage(config: SpikformerConfig, neuron: NeuronSpec, stage: int, context: BuildContext) -> nn.Module:
    first = stage == 0
    unit_class: Callable[..., ConvNormNeuron] = ConvNormNeuron
    if first and config.event_frames:
        unit_class = partial(EventBlock, input_shape=config.input_shape)
    elif first:
        unit_class = partial(ImageStage, time_steps=config.time_steps)
    outputs = [config.embed_dim // 2 ** (STEM_STAGES - 1 - index) for index in range(STEM_STAGES)]
    return _unit(
        config.in_channels if first else outputs[stage - 1],
        outputs[stage],
        neuron,
        context,
        unit_class=unit_class,
        kernel_size=3,
        wire=Wire.DENSE if first else Wire.SPIKES,
        whole_input=first,
        pool=stage >= (2 if config.patch_size == 4 else 0),
    )


def _positional_encoding(dim: int, neuron: NeuronSpec, context: BuildContext) -> nn.Module:
    return _unit(dim, dim, neuron, context, unit_class=PositionalEncoding, kernel_size=3, wire=Wire.SPIKES)


def _attention(dim: int, heads: int, neuron: NeuronSpec, context: BuildContext) -> nn.Module:
    return AttentionHalf(
        dim,
        heads,
        context,
        qkv=_unit(dim, 3 * dim, neuron, context, wire=Wire.COUNTS, blocks=3),
        neuron=build_neuron(replace(neuron, v_threshold=ATTENTION_THRESHOLD), context),
        projection=_unit(dim, dim, neuron, context, wire=Wire.SPIKES),
    )


def _mlp(dim: int, hidden: int, neuron: NeuronSpec, context: BuildContext) -> nn.Module:
    return MLPHalf(
        _unit(dim, hidden, neuron, context, wire=Wire.COUNTS),
        _unit(hidden, dim, neuron, context, wire=Wire.SPIKES),
    )


def _unit(
    inputs: int,
    outputs: int,
    neuron: NeuronSpec,
    context: BuildContext,
    *,
    wire: Wire,
    unit_class: Callable[..., ConvNormNeuron] = ConvNormNeuron,
    kernel_size: int = 1,
    blocks: int = 1,
    whole_input: bool = False,
    pool: bool = False,
) -> ConvNormNeuron:
    """A unit of the stem (kernel 3) or of a block (pointwise), in the style that moves fewer bytes."""
    conv = ParallelConv(
        inputs,
        outputs,
        kernel_size,
        context,
        initialise=trunc_normal,
        style="column" if whole_input else cheaper_style(inputs, outputs),
        padding=kernel_size // 2,
        pointwise=kernel_size == 1,
        whole_input=whole_input,
        wire=wire,
        blocks=blocks,
    )
    norm = ParallelBatchNorm(outputs, context, blocks=blocks)
    return unit_class(conv, norm, build_neuron(neuron, context), pool=pool)
