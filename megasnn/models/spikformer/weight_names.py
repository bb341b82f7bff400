"""Names of Spikformer's tensors in SpikingJelly, and in the code published with the paper (arXiv 2209.15425;
github.com/ZK-Zhou/spikformer).

    here                                     SpikingJelly                                  published
    patch_embed.stages.0.conv.weight         patch_embed.stages.0.conv_bn.block.0.weight   patch_embed.proj_conv.weight
    patch_embed.positional_encoding.norm     ....positional_encoding.conv_bn.block.1       patch_embed.rpe_bn
    blocks.0.attention.qkv.conv.weight       blocks.0.attn.qkv_conv_bn.0.weight            block.0.attn.q_linear.weight
    blocks.0.attention.neuron.w              blocks.0.attn.attn_lif.w                      (none)
    blocks.0.mlp.fc1.norm.weight             blocks.0.mlp.fc1.1.weight                     block.0.mlp.fc1_bn.weight

SpikingJelly's tensors are the same, shape by shape. The published code has a model for CIFAR10 (`_linear`) and one for
ImageNet (`_conv`), with q, k and v apart. Where it has a bias before a norm, the norm takes the bias away again: a mean
that is smaller by it does the same, so here the bias is part of the running mean. Its layer norms compute nothing. One
thing differs that no weight can tell: its stem pools after a stage's neuron, SpikingJelly and MegaSNN before it.
Weights trained there need some training here.
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
    **{f"patch_embed.{x}": (f"patch_embed.{x}", _PARTS_OF_STEM) for x in ("stages.{}", "positional_encoding")},
    **{
        f"blocks.{{}}.attention.{ours}": ("blocks.{}.attn", (f"{x}_conv_bn.0", f"{x}_conv_bn.1", f"{x}_lif"))
        for ours, x in (("qkv", "qkv"), ("projection", "proj"))
    },
    **{f"blocks.{{}}.mlp.fc{i}": ("blocks.{}.mlp", (f"fc{i}.0", f"fc{i}.1", f"neuron{i}")) for i in (1, 2)},
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

# --- the published code

_IN_BLOCK = {
    "attention.qkv": ("attn.q", "attn.k", "attn.v"),
    "attention.projection": ("attn.proj",),
    **{f"mlp.fc{i}": (f"mlp.fc{i}",) for i in (1, 2)},
}


def _conv_norms(names: Collection[str]) -> dict[str, list[tuple[str, str]]]:
    """Our path of each unit -> theirs of its convolution and norm; three of each for q, k and v."""
    conv_norms = {"patch_embed.positional_encoding": [("patch_embed.rpe_conv", "patch_embed.rpe_bn")]}
    for stage in range(STEM_STAGES):
        conv, norm = (f"patch_embed.proj_{part}{stage or ''}" for part in ("conv", "bn"))
        conv_norms[f"patch_embed.stages.{stage}"] = [(conv, norm)]
    kind = "linear" if "block.0.attn.q_linear.weight" in names else "conv"
    blocks = {match[1] for name in names if (match := re.match(r"block\.(\d+)\.", name))}
    for block in range(len(blocks)):  # counted: a stranger's numbers may be of any size
        for ours, theirs in _IN_BLOCK.items():
            paths = [f"block.{block}.{path}" for path in theirs]
            conv_norms[f"blocks.{block}.{ours}"] = [(f"{path}_{kind}", f"{path}_bn") for path in paths]
    return conv_norms


def _incoming(names: Collection[str]) -> NameMap:
    recipe = {name: Made((name,)) for name in ("head.weight", "head.bias")}
    for ours, conv_norms in _conv_norms(names).items():
        weights, biases = (tuple(f"{conv}.{tensor}" for conv, _ in conv_norms) for tensor in ("weight", "bias"))
        recipe[f"{ours}.conv.weight"] = Made(weights, _joined_pointwise if ours.startswith("blocks.") else None)
        for tensor in NORM_TENSORS:
            recipe[f"{ours}.norm.{tensor}"] = Made(tuple(f"{norm}.{tensor}" for _, norm in conv_norms), _joined)
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
    unused=(".norm1.weight", ".norm1.bias", ".norm2.weight", ".norm2.bias"),
)

DIALECTS = (SPIKINGJELLY, PUBLISHED)
