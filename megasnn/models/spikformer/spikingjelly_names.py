"""Weights to and from SpikingJelly's Spikformer, through an explicit table of names.

The tensors are the same on both sides, shape by shape; only names differ:

    here                                     spikingjelly.activation_based.model.spikformer
    patch_embed.stages.0.conv.weight         patch_embed.stages.0.conv_bn.block.0.weight
    patch_embed.stages.0.norm.running_mean   patch_embed.stages.0.conv_bn.block.1.running_mean
    blocks.0.attention.qkv.conv.weight       blocks.0.attn.qkv_conv_bn.0.weight
    blocks.0.attention.neuron.w              blocks.0.attn.attn_lif.w          (parametric LIF only)
    blocks.0.mlp.fc1.norm.weight             blocks.0.mlp.fc1.1.weight
    head.weight                              head.weight
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from torch import Tensor

from megasnn.models.names import NORM_TENSORS, Dialect, ModelValues, Recipe, renamed, require_equal
from megasnn.models.spikformer.dimensions import STEM_STAGES


def spikingjelly_names(depth: int, parametric: bool) -> dict[str, str]:
    """Our global name -> SpikingJelly's name, for every tensor of a Spikformer with `depth` blocks.

    Args:
        parametric: the neurons are parametric LIF and have a trained time constant `w` each.
    """
    units: list[tuple[str, str, str, str]] = []  # our prefix; their convolution, norm and neuron
    for stage in [f"stages.{index}" for index in range(STEM_STAGES)] + ["positional_encoding"]:
        unit = f"patch_embed.{stage}"
        units.append((unit, f"{unit}.conv_bn.block.0", f"{unit}.conv_bn.block.1", f"{unit}.neuron"))
    names: dict[str, str] = {}
    for block in (f"blocks.{index}" for index in range(depth)):
        for ours, theirs in (("qkv", "qkv"), ("projection", "proj")):
            unit, other = f"{block}.attention.{ours}", f"{block}.attn.{theirs}"
            units.append((unit, f"{other}_conv_bn.0", f"{other}_conv_bn.1", f"{other}_lif"))
        for layer in (1, 2):
            unit = f"{block}.mlp.fc{layer}"
            units.append((unit, f"{unit}.0", f"{unit}.1", f"{block}.mlp.neuron{layer}"))
        if parametric:
            names[f"{block}.attention.neuron.w"] = f"{block}.attn.attn_lif.w"
    for unit, conv, norm, neuron in units:
        names[f"{unit}.conv.weight"] = f"{conv}.weight"
        names |= {f"{unit}.norm.{tensor}": f"{norm}.{tensor}" for tensor in NORM_TENSORS}
        if parametric:
            names[f"{unit}.neuron.w"] = f"{neuron}.w"
    return names | {"head.weight": "head.weight", "head.bias": "head.bias"}


def from_spikingjelly(state_dict: Mapping[str, Tensor], depth: int | None = None) -> dict[str, Tensor]:
    """A SpikingJelly Spikformer's state_dict under our global names. The tensors are not copied.

    Args:
        depth: number of blocks; None takes what the names say.

    Raises:
        CheckpointError: names are missing or unexpected (lists them, as SpikingJelly calls them).
    """
    ours = spikingjelly_names(block_count(state_dict, depth), parametric=_is_parametric(state_dict))
    require_equal(ours.values(), state_dict, "this is not the state_dict of SpikingJelly's Spikformer:")
    return {name: state_dict[theirs] for name, theirs in ours.items()}


def to_spikingjelly(tensors: Mapping[str, Tensor], depth: int | None = None) -> dict[str, Tensor]:
    """Global tensors of a Spikformer as a state_dict that SpikingJelly's model loads strictly; no copies.

    Raises:
        CheckpointError: names are missing or unexpected (lists them, as we call them).
    """
    ours = spikingjelly_names(block_count(tensors, depth), parametric=_is_parametric(tensors))
    require_equal(ours, tensors, "these are not the tensors of a Spikformer:")
    return {theirs: tensors[name] for name, theirs in ours.items()}


def block_count(names: Iterable[str], depth: int | None = None) -> int:
    """`depth` where it is given, otherwise what the names say."""
    if depth is not None:
        return depth
    found = (re.match(r"blocks?\.(\d+)\.", name) for name in names)
    return len({match[1] for match in found if match})  # counted: a stranger's numbers may be of any size


def _is_parametric(names: Iterable[str]) -> bool:
    return any(name.endswith(".w") for name in names)


def _incoming(theirs: Collection[str]) -> Recipe:
    return renamed(spikingjelly_names(block_count(theirs), _is_parametric(theirs)))


def _outgoing(ours: Collection[str], model: ModelValues | None) -> Recipe:
    names = spikingjelly_names(block_count(ours), _is_parametric(ours))
    return renamed({theirs: name for name, theirs in names.items()})


SPIKINGJELLY = Dialect(
    name="spikingjelly",
    title="SpikingJelly's Spikformer",
    marker="patch_embed.stages.0.conv_bn.block.0.weight",
    incoming=_incoming,
    outgoing=_outgoing,
)
