"""Weights to and from the code published with Spikformer (arXiv 2209.15425; github.com/ZK-Zhou/spikformer).

Its two models of images have the same units as SpikingJelly's, under other names and with q, k and v apart:

    here                                   cifar10                                imagenet
    patch_embed.stages.1.conv.weight       patch_embed.proj_conv1.weight          the same
    patch_embed.positional_encoding.norm   patch_embed.rpe_bn                     the same
    blocks.0.attention.qkv.conv.weight     block.0.attn.{q,k,v}_linear.weight     block.0.attn.{q,k,v}_conv.weight
    blocks.0.attention.projection.norm     block.0.attn.proj_bn                   the same
    blocks.0.mlp.fc1.conv.weight           block.0.mlp.fc1_linear.weight          block.0.mlp.fc1_conv.weight

Where it has a bias before a norm, the norm takes the bias away again: a mean that is smaller by it does the same, so
here the bias is part of the running mean, and there it comes out as zero. Its layer norms compute nothing.

One thing differs that no weight can tell: its stem pools after a stage's neuron, SpikingJelly and MegaSNN before it.
Weights trained there need some training here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from megasnn.files import CheckpointError
from megasnn.models.names import NORM_TENSORS, Dialect, Made, ModelValues, Recipe
from megasnn.models.spikformer.dimensions import STEM_STAGES
from megasnn.models.spikformer.spikingjelly_names import block_count

Variant = Literal["cifar10", "imagenet"]
PARTS = ("q", "k", "v")
UNUSED = (".norm1.weight", ".norm1.bias", ".norm2.weight", ".norm2.bias")


@dataclass(frozen=True)
class _Unit:
    """A convolution and its norm.

    Attributes:
        ours: our prefix.
        convs, norms: their prefixes; three of each for q, k and v.
        biased: whether cifar10, and whether imagenet has a bias before the norm; None outside the blocks.
        spatial: dimensions behind the channels of imagenet's weight.
    """

    ours: str
    convs: tuple[str, ...]
    norms: tuple[str, ...]
    biased: dict[Variant, bool]
    spatial: int


def _stem_units(names: Collection[str]) -> list[_Unit]:
    # The first file of the repository counts the stages of the stem from one.
    early = "patch_embed.block1_conv.weight" in names
    units = []
    for stage in range(STEM_STAGES):
        number = str(stage) if stage else ""
        conv, norm = (f"block{stage + 1}_conv", f"block{stage + 1}_bn") if early else (f"proj_conv{number}", "")
        units.append((f"stages.{stage}", conv, norm or f"proj_bn{number}"))
    units.append(("positional_encoding", "rpe_conv", "rpe_bn"))
    unbiased: dict[Variant, bool] = {"cifar10": False, "imagenet": False}
    return [
        _Unit(f"patch_embed.{ours}", (f"patch_embed.{conv}",), (f"patch_embed.{norm}",), unbiased, 2)
        for ours, conv, norm in units
    ]


def _block_units(block: int, kind: str) -> list[_Unit]:
    ours, attention, mlp = f"blocks.{block}", f"block.{block}.attn", f"block.{block}.mlp"
    biased: dict[Variant, bool] = {"cifar10": True, "imagenet": True}
    qkv = tuple(f"{attention}.{part}_{kind}" for part in PARTS)
    norms = tuple(f"{attention}.{part}_bn" for part in PARTS)
    units = [
        _Unit(f"{ours}.attention.qkv", qkv, norms, {"cifar10": True, "imagenet": False}, 1),
        _Unit(f"{ours}.attention.projection", (f"{attention}.proj_{kind}",), (f"{attention}.proj_bn",), biased, 1),
    ]
    for layer in (1, 2):
        conv, norm = (f"{mlp}.fc{layer}_{kind}",), (f"{mlp}.fc{layer}_bn",)
        units.append(_Unit(f"{ours}.mlp.fc{layer}", conv, norm, biased, 2))
    return units


# --- theirs to ours


def _incoming(names: Collection[str]) -> Recipe:
    if "pos_embed" in names:
        raise CheckpointError(
            "these are weights of the published cifar10dvs model, whose attention is scaled by 0.25; "
            "this one's is scaled by 0.125, so they would compute something else"
        )
    kind = "linear" if "block.0.attn.q_linear.weight" in names else "conv"
    recipe: dict[str, Made] = {"head.weight": Made(("head.weight",)), "head.bias": Made(("head.bias",))}
    for unit in _stem_units(names):
        recipe |= _unit_in(unit, names, pointwise=False)
    for block in range(block_count(names)):
        for unit in _block_units(block, kind):
            recipe |= _unit_in(unit, names, pointwise=True)
    return recipe


def _unit_in(unit: _Unit, names: Collection[str], pointwise: bool) -> Recipe:
    count = len(unit.convs)
    weights = tuple(f"{conv}.weight" for conv in unit.convs)
    recipe = {f"{unit.ours}.conv.weight": Made(weights, _joined_pointwise if pointwise else None)}
    for tensor in NORM_TENSORS:
        norms = tuple(f"{norm}.{tensor}" for norm in unit.norms)
        join: Callable[..., Tensor] = _first if tensor == "num_batches_tracked" else _joined
        recipe[f"{unit.ours}.norm.{tensor}"] = Made(norms, join)
    biases = tuple(f"{conv}.bias" for conv in unit.convs)
    if biases[0] in names:
        means = recipe[f"{unit.ours}.norm.running_mean"].sources
        recipe[f"{unit.ours}.norm.running_mean"] = Made(means + biases, partial(_without_biases, count))
    return recipe


def _joined(*parts: Tensor) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _first(*parts: Tensor) -> Tensor:
    return parts[0]


def _joined_pointwise(*weights: Tensor) -> Tensor:
    return _joined(*(weight.flatten(1).unsqueeze(-1) for weight in weights))


def _without_biases(count: int, *means_and_biases: Tensor) -> Tensor:
    return _joined(*means_and_biases[:count]) - _joined(*means_and_biases[count:])


# --- ours to theirs


def _outgoing(variant: Variant, names: Collection[str], model: ModelValues | None) -> Recipe:
    if trained := next((name for name in names if name.endswith(".w")), None):
        raise CheckpointError(f"{trained}: the published code's neurons have no trained time constant")
    kind = "linear" if variant == "cifar10" else "conv"
    recipe: dict[str, Made] = {"head.weight": Made(("head.weight",)), "head.bias": Made(("head.bias",))}
    for unit in _stem_units(()):
        recipe |= _unit_out(unit, biased=False, spatial=None)
    for block in range(block_count(names)):
        for unit in _block_units(block, kind):
            recipe |= _unit_out(unit, unit.biased[variant], unit.spatial if variant == "imagenet" else 0)
        like = f"blocks.{block}.attention.projection.norm.weight"
        for norm in ("norm1", "norm2"):
            recipe[f"block.{block}.{norm}.weight"] = Made((like,), torch.ones_like)
            recipe[f"block.{block}.{norm}.bias"] = Made((like,), torch.zeros_like)
    return recipe


def _unit_out(unit: _Unit, biased: bool, spatial: int | None) -> Recipe:
    """`spatial`: dimensions behind the channels of their pointwise weights; None leaves the weight as it is."""
    recipe, parts = {}, len(unit.convs)
    for index, (conv, norm) in enumerate(zip(unit.convs, unit.norms, strict=True)):
        recipe[f"{conv}.weight"] = Made((f"{unit.ours}.conv.weight",), partial(_weight_part, index, parts, spatial))
        if biased:
            recipe[f"{conv}.bias"] = Made((f"{unit.ours}.norm.bias",), partial(_zero_part, parts))
        for tensor in NORM_TENSORS:
            made = Made((f"{unit.ours}.norm.{tensor}",), partial(_part, index, parts))
            recipe[f"{norm}.{tensor}"] = made
    return recipe


def _part(index: int, parts: int, value: Tensor) -> Tensor:
    return value if parts == 1 or value.ndim == 0 else value.chunk(parts)[index]


def _zero_part(parts: int, value: Tensor) -> Tensor:
    return torch.zeros_like(_part(0, parts, value))


def _weight_part(index: int, parts: int, spatial: int | None, weight: Tensor) -> Tensor:
    part = _part(index, parts, weight)
    return part if spatial is None else part.reshape(*part.shape[:2], *(1,) * spatial)


def _outgoing_by_patch_size(names: Collection[str], model: ModelValues | None) -> Recipe:
    """Which of the two models this is follows from its configuration."""
    if model is None or "patch_size" not in model:
        raise CheckpointError(
            "which of the published models this is cannot be told without its configuration; name it: "
            "--names published-cifar10 or published-imagenet"
        )
    return _outgoing("cifar10" if model["patch_size"] == 4 else "imagenet", names, model)


def _dialect(name: str, title: str, outgoing: Callable[[Collection[str], ModelValues | None], Recipe]) -> Dialect:
    return Dialect(
        name=name,
        title=title,
        marker="block.0.attn.q_bn.weight",
        incoming=_incoming,
        outgoing=outgoing,
        is_unused=lambda name: name.endswith(UNUSED),
    )


def published(variant: Variant) -> Dialect:
    """The names of one of the two models. Both are understood when weights come in, whichever is asked for."""
    return _dialect(f"published-{variant}", f"the published Spikformer ({variant})", partial(_outgoing, variant))


EITHER = _dialect("published", "the published Spikformer", _outgoing_by_patch_size)
