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
that is smaller by it does the same, so here the bias is part of the running mean, and there it comes out as zero. Its
layer norms compute nothing. One thing differs that no weight can tell: its stem pools after a stage's neuron,
SpikingJelly and MegaSNN before it. Weights trained there need some training here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megasnn.files import CheckpointError
from megasnn.models.spikformer.model import STEM_STAGES
from megasnn.models.weight_names import (
    NORM_TENSORS,
    Dialect,
    Made,
    ModelValues,
    Recipe,
    inverse,
    is_parametric,
    rename_all,
    renamed,
)

Variant = Literal["cifar10", "imagenet"]
PARTS = ("q", "k", "v")
UNUSED = (".norm1.weight", ".norm1.bias", ".norm2.weight", ".norm2.bias")


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
    """A SpikingJelly Spikformer's state_dict under our global names; no copies. `depth`: number of blocks; None takes
    what the names say.

    Raises:
        CheckpointError: names are missing or unexpected (lists them, as SpikingJelly calls them).
    """
    ours = spikingjelly_names(block_count(state_dict, depth), is_parametric(state_dict))
    return rename_all(ours, state_dict, "this is not the state_dict of SpikingJelly's Spikformer:")


def to_spikingjelly(tensors: Mapping[str, Tensor], depth: int | None = None) -> dict[str, Tensor]:
    """Global tensors of a Spikformer as a state_dict that SpikingJelly's model loads strictly; args and raises as
    `from_spikingjelly`."""
    ours = spikingjelly_names(block_count(tensors, depth), is_parametric(tensors))
    return rename_all(inverse(ours), tensors, "these are not the tensors of a Spikformer:")


def block_count(names: Iterable[str], depth: int | None = None) -> int:
    """`depth` where it is given, otherwise what the names say."""
    if depth is not None:
        return depth
    found = (re.match(r"blocks?\.(\d+)\.", name) for name in names)
    return len({match[1] for match in found if match})  # counted: a stranger's numbers may be of any size


SPIKINGJELLY = Dialect(
    name="spikingjelly",
    title="SpikingJelly's Spikformer",
    marker="patch_embed.stages.0.conv_bn.block.0.weight",
    incoming=lambda theirs: renamed(spikingjelly_names(block_count(theirs), is_parametric(theirs))),
    outgoing=lambda ours, model: renamed(inverse(spikingjelly_names(block_count(ours), is_parametric(ours)))),
)

# --- the published code


class _Unit(NamedTuple):
    """A convolution and its norm.

    Attributes:
        ours: our prefix. convs, norms: their prefixes; three of each for q, k and v.
        biased: variants with a bias before the norm.
        spatial: dimensions behind the channels of imagenet's weight, where it is pointwise.
    """

    ours: str
    convs: tuple[str, ...]
    norms: tuple[str, ...]
    biased: tuple[Variant, ...] = ()
    spatial: int | None = None


def _units(names: Collection[str], kind: str) -> Iterator[_Unit]:
    """Args: names: theirs or ours. kind: "linear" or "conv", as pointwise weights are called."""
    # The first file of the repository counts the stages of the stem from one.
    early, stem = "patch_embed.block1_conv.weight" in names, [("positional_encoding", "rpe_conv", "rpe_bn")]
    for stage in range(STEM_STAGES):
        number = str(stage) if stage else ""
        theirs = (
            (f"block{stage + 1}_conv", f"block{stage + 1}_bn") if early else (f"proj_conv{number}", f"proj_bn{number}")
        )
        stem.append((f"stages.{stage}", *theirs))
    for ours, conv, norm in stem:
        yield _Unit(f"patch_embed.{ours}", (f"patch_embed.{conv}",), (f"patch_embed.{norm}",))
    both: tuple[Variant, ...] = ("cifar10", "imagenet")
    for block in range(block_count(names)):
        ours, attention, mlp = f"blocks.{block}", f"block.{block}.attn", f"block.{block}.mlp"
        qkv, norms = (tuple(f"{attention}.{part}_{name}" for part in PARTS) for name in (kind, "bn"))
        yield _Unit(f"{ours}.attention.qkv", qkv, norms, ("cifar10",), 1)
        yield _Unit(f"{ours}.attention.projection", (f"{attention}.proj_{kind}",), (f"{attention}.proj_bn",), both, 1)
        for layer in (1, 2):
            yield _Unit(f"{ours}.mlp.fc{layer}", (f"{mlp}.fc{layer}_{kind}",), (f"{mlp}.fc{layer}_bn",), both, 2)


def _incoming(names: Collection[str]) -> Recipe:
    if "pos_embed" in names:
        raise CheckpointError(
            "these are weights of the published cifar10dvs model, whose attention is scaled by 0.25; "
            "this one's is scaled by 0.125, so they would compute something else"
        )
    recipe = {name: Made((name,)) for name in ("head.weight", "head.bias")}
    for unit in _units(names, "linear" if "block.0.attn.q_linear.weight" in names else "conv"):
        weights, biases = (tuple(f"{conv}.{tensor}" for conv in unit.convs) for tensor in ("weight", "bias"))
        recipe[f"{unit.ours}.conv.weight"] = Made(weights, None if unit.spatial is None else _joined_pointwise)
        for tensor in NORM_TENSORS:
            sources = tuple(f"{norm}.{tensor}" for norm in unit.norms)
            recipe[f"{unit.ours}.norm.{tensor}"] = Made(sources, _joined)
        if biases[0] in names:
            means = tuple(f"{norm}.running_mean" for norm in unit.norms)
            recipe[f"{unit.ours}.norm.running_mean"] = Made(means + biases, _without_biases)
    return recipe


def _joined(*parts: Tensor) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 and parts[0].ndim else parts[0]


def _joined_pointwise(*weights: Tensor) -> Tensor:
    return _joined(*(weight.flatten(1).unsqueeze(-1) for weight in weights))


def _without_biases(*means_and_biases: Tensor) -> Tensor:
    half = len(means_and_biases) // 2
    return _joined(*means_and_biases[:half]) - _joined(*means_and_biases[half:])


def _outgoing(variant: Variant, names: Collection[str], model: ModelValues | None) -> Recipe:
    if trained := next((name for name in names if name.endswith(".w")), None):
        raise CheckpointError(f"{trained}: the published code's neurons have no trained time constant")
    recipe = {name: Made((name,)) for name in ("head.weight", "head.bias")}
    for unit in _units(names, "linear" if variant == "cifar10" else "conv"):
        parts, spatial = len(unit.convs), unit.spatial
        if spatial is not None and variant == "cifar10":
            spatial = 0
        for index, (conv, norm) in enumerate(zip(unit.convs, unit.norms, strict=True)):
            weight = partial(_weight_part, index, parts, spatial)
            recipe[f"{conv}.weight"] = Made((f"{unit.ours}.conv.weight",), weight)
            if variant in unit.biased:
                recipe[f"{conv}.bias"] = Made((f"{unit.ours}.norm.bias",), partial(_zeros, parts))
            for tensor in NORM_TENSORS:
                recipe[f"{norm}.{tensor}"] = Made((f"{unit.ours}.norm.{tensor}",), partial(_part, index, parts))
    for block in range(block_count(names)):
        like = (f"blocks.{block}.attention.projection.norm.weight",)
        for norm in ("norm1", "norm2"):  # which compute nothing
            recipe[f"block.{block}.{norm}.weight"] = Made(like, torch.ones_like)
            recipe[f"block.{block}.{norm}.bias"] = Made(like, torch.zeros_like)
    return recipe


def _part(index: int, parts: int, value: Tensor) -> Tensor:
    return value if parts == 1 or value.ndim == 0 else value.chunk(parts)[index]


def _zeros(parts: int, value: Tensor) -> Tensor:
    return torch.zeros_like(_part(0, parts, value))


def _weight_part(index: int, parts: int, spatial: int | None, weight: Tensor) -> Tensor:
    part = _part(index, parts, weight)
    return part if spatial is None else part.reshape(*part.shape[:2], *(1,) * spatial)


def _outgoing_by_patch_size(names: Collection[str], model: ModelValues | None) -> Recipe:
    """The one of the two models that its configuration tells."""
    if model is None or "patch_size" not in model:
        raise CheckpointError(
            "which of the published models this is cannot be told without its configuration; name it: "
            "--names published-cifar10 or published-imagenet"
        )
    return _outgoing("cifar10" if model["patch_size"] == 4 else "imagenet", names, model)


def _published(variant: Variant | None) -> Dialect:
    """The names of one of the two models. Both are understood when weights come in, whichever is asked for."""
    return Dialect(
        name=f"published-{variant}" if variant else "published",
        title=f"the published Spikformer{f' ({variant})' if variant else ''}",
        marker="block.0.attn.q_bn.weight",
        incoming=_incoming,
        outgoing=partial(_outgoing, variant) if variant else _outgoing_by_patch_size,
        is_unused=lambda name: name.endswith(UNUSED),
    )


DIALECTS = (SPIKINGJELLY, _published(None), _published("cifar10"), _published("imagenet"))
