"""Spikformer's tensor names in SpikingJelly and as published (arXiv 2209.15425; ZK-Zhou/spikformer).

SpikingJelly's tensors have equal shapes. The published code has q, k and v apart, in a model for CIFAR10 (`_linear`)
and one for ImageNet (`_conv`). Its stem pools after a stage's neuron, SpikingJelly and MegaSNN before it: published
weights need some training here.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import torch
from torch import Tensor

from megasnn.models.spikformer.model import STEM_STAGES
from megasnn.models.weight_names import NORM_TENSORS, Dialect, Made, NameMap, conv_norm_prefixes, prefix_dialect

_PARTS_OF_STEM = ("conv_bn.block.0", "conv_bn.block.1", "neuron")
_CONV_NORMS = {
    "patch_embed.stages.{}": ("patch_embed.stages.{}", _PARTS_OF_STEM),
    "patch_embed.positional_encoding": ("patch_embed.positional_encoding", _PARTS_OF_STEM),
    "blocks.{}.attention.qkv": ("blocks.{}.attn", ("qkv_conv_bn.0", "qkv_conv_bn.1", "qkv_lif")),
    "blocks.{}.attention.projection": ("blocks.{}.attn", ("proj_conv_bn.0", "proj_conv_bn.1", "proj_lif")),
    "blocks.{}.mlp.fc1": ("blocks.{}.mlp", ("fc1.0", "fc1.1", "neuron1")),
    "blocks.{}.mlp.fc2": ("blocks.{}.mlp", ("fc2.0", "fc2.1", "neuron2")),
}

SPIKINGJELLY = prefix_dialect(
    "spikingjelly",
    "SpikingJelly's Spikformer",
    marker="patch_embed.stages.0.conv_bn.block.0.weight",
    prefixes={
        **conv_norm_prefixes(_CONV_NORMS),
        "blocks.{}.attention.neuron": "blocks.{}.attn.attn_lif",
        "head": "head",
    },
)

# Our path in a block -> paths in the published block.
_IN_BLOCK = {
    "attention.qkv": ("attn.q", "attn.k", "attn.v"),
    "attention.projection": ("attn.proj",),
    "mlp.fc1": ("mlp.fc1",),
    "mlp.fc2": ("mlp.fc2",),
}


def _conv_norms(names: Collection[str]) -> dict[str, list[tuple[str, str]]]:
    """Our ConvNormNeuron path -> their convolutions and norms: one pair, or three for q, k and v."""
    conv_norms = {"patch_embed.positional_encoding": [("patch_embed.rpe_conv", "patch_embed.rpe_bn")]}
    for stage in range(STEM_STAGES):
        # The first stage has none.
        number = stage or ""
        pair = (f"patch_embed.proj_conv{number}", f"patch_embed.proj_bn{number}")
        conv_norms[f"patch_embed.stages.{stage}"] = [pair]
    kind = "linear" if "block.0.attn.q_linear.weight" in names else "conv"
    blocks = {match[1] for name in names if (match := re.match(r"block\.(\d+)\.", name))}
    # The number of blocks, because a foreign file may contain any numbers.
    for block in range(len(blocks)):
        for ours, theirs in _IN_BLOCK.items():
            pairs = [(f"block.{block}.{path}_{kind}", f"block.{block}.{path}_bn") for path in theirs]
            conv_norms[f"blocks.{block}.{ours}"] = pairs
    return conv_norms


def _incoming(names: Collection[str]) -> NameMap:
    recipe = {name: Made((name,)) for name in ("head.weight", "head.bias")}
    for ours, conv_norms in _conv_norms(names).items():
        weights = tuple(f"{conv}.weight" for conv, _ in conv_norms)
        biases = tuple(f"{conv}.bias" for conv, _ in conv_norms)
        recipe[f"{ours}.conv.weight"] = Made(weights, _joined_pointwise if ours.startswith("blocks.") else None)
        for tensor in NORM_TENSORS:
            sources = tuple(f"{norm}.{tensor}" for _, norm in conv_norms)
            recipe[f"{ours}.norm.{tensor}"] = Made(sources, _joined)
        # A norm cancels the bias before it, so the running mean takes it up.
        if biases[0] in names:
            means = recipe[f"{ours}.norm.running_mean"].sources
            recipe[f"{ours}.norm.running_mean"] = Made(means + biases, _without_biases)
    return recipe


def _joined(*parts: Tensor) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 and parts[0].ndim else parts[0]


def _joined_pointwise(*weights: Tensor) -> Tensor:
    return _joined(*(weight.flatten(1).unsqueeze(-1) for weight in weights))


def _without_biases(*means_and_biases: Tensor) -> Tensor:
    half = len(means_and_biases) // 2
    return _joined(*means_and_biases[:half]) - _joined(*means_and_biases[half:])


PUBLISHED = Dialect(
    name="published",
    title="the published Spikformer",
    marker="block.0.attn.q_bn.weight",
    incoming=_incoming,
    outgoing=None,
    # The published layer norms compute nothing.
    unused=(".norm1.weight", ".norm1.bias", ".norm2.weight", ".norm2.bias"),
)

DIALECTS = (SPIKINGJELLY, PUBLISHED)
