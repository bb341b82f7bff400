"""Weights under the names of the published Spikformer become those of SpikingJelly's that compute the same."""

from __future__ import annotations

import pytest
import torch
from spikingjelly.activation_based.model.spikformer import Spikformer
from torch import Tensor

from megasnn.files import CheckpointError
from megasnn.models.registry import dialect_for, dialect_of
from megasnn.models.spikformer.weight_names import SPIKINGJELLY
from megasnn.models.weight_names import NORM_TENSORS, values_of

PATCH = {"cifar10": 4, "imagenet": 16}
DIM = 16


def published(kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A state_dict of SpikingJelly's model, and the published one of the same function: q, k and v apart, biases in
    front of norms, whose means are larger by them, and layer norms that compute nothing."""
    torch.manual_seed(0)
    sizes = {"img_size_h": 32, "img_size_w": 32, "embed_dims": DIM, "num_heads": 2, "depths": 2}
    model = Spikformer(T=2, patch_size=PATCH[kind], num_classes=5, **sizes).double()
    ours = {name: torch.rand_like(x) if x.is_floating_point() else x + 3 for name, x in model.state_dict().items()}
    theirs = {name: value for name, value in ours.items() if name.startswith("head.")}
    linear = kind == "cifar10"

    def add(unit: str, conv: str, norm: str, bias: bool, rows: slice = slice(None), pixels: int = 0) -> None:
        weight = ours[f"{unit}.0.weight"][rows]
        theirs[f"{conv}.weight"] = weight.reshape(*weight.shape[:2], *[1] * pixels * (not linear)) if pixels else weight
        for tensor in NORM_TENSORS:
            value = ours[f"{unit}.1.{tensor}"]
            theirs[f"{norm}.{tensor}"] = value[rows] if value.ndim else value
        if bias:
            theirs[f"{conv}.bias"] = torch.rand(len(weight), dtype=torch.float64)
            theirs[f"{norm}.running_mean"] = theirs[f"{norm}.running_mean"] + theirs[f"{conv}.bias"]

    for stage in range(4):
        names = (f"patch_embed.proj_{part}{stage or ''}" for part in ("conv", "bn"))
        add(f"patch_embed.stages.{stage}.conv_bn.block", *names, bias=False)
    add("patch_embed.positional_encoding.conv_bn.block", "patch_embed.rpe_conv", "patch_embed.rpe_bn", bias=False)
    layer = "linear" if linear else "conv"
    for block in range(2):
        attention, mlp = f"block.{block}.attn", f"block.{block}.mlp"
        for number, part in enumerate("qkv"):
            conv, norm = f"{attention}.{part}_{layer}", f"{attention}.{part}_bn"
            rows = slice(DIM * number, DIM * (number + 1))
            add(f"blocks.{block}.attn.qkv_conv_bn", conv, norm, linear, rows, pixels=1)
        add(f"blocks.{block}.attn.proj_conv_bn", f"{attention}.proj_{layer}", f"{attention}.proj_bn", True, pixels=1)
        for fc in ("fc1", "fc2"):
            add(f"blocks.{block}.mlp.{fc}", f"{mlp}.{fc}_{layer}", f"{mlp}.{fc}_bn", True, pixels=2)
        for norm in ("norm1", "norm2"):
            theirs |= {f"block.{block}.{norm}.{tensor}": torch.rand(DIM) for tensor in ("weight", "bias")}
    return ours, theirs


def first_file(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names of the repository's first file, which counts the stages of the stem from one."""
    renamed = {}
    for name, value in weights.items():
        for stage in range(4):
            for part in ("conv", "bn"):
                old, new = f"patch_embed.proj_{part}{stage or ''}.", f"patch_embed.block{stage + 1}_{part}."
                name = name.replace(old, new)
        renamed[name] = value
    return renamed


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("kind", PATCH)
def test_they_become_spikingjellys(kind: str, early: bool) -> None:
    expected, weights = published(kind)
    weights = first_file(weights) if early else weights
    assert ("patch_embed.block1_conv.weight" in weights) == early
    mine = values_of(dialect_of(weights).to_ours(weights), weights)
    found = values_of(SPIKINGJELLY.from_ours(mine), mine)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-14, msg=name)


def test_what_does_not_belong_is_refused() -> None:
    _, weights = published("imagenet")
    for names, told in (
        (weights.keys() - {"block.1.attn.k_bn.weight"}, r"block\.1\.attn\.k_bn\.weight: missing"),
        ({*weights, "block.0.attn.relative"}, r"block\.0\.attn\.relative: unexpected"),
        ({*weights, "pos_embed"}, "scaled by 0.25"),
    ):
        with pytest.raises(CheckpointError, match=told):
            dialect_of(weights).to_ours(names)
    mine = values_of(dialect_of(weights).to_ours(weights), weights)
    with pytest.raises(CheckpointError, match="--names spikingjelly"):
        dialect_for("published", mine).from_ours(mine)
    with pytest.raises(CheckpointError, match="belong to no program known here"):
        dialect_of(["layer1.weight"])
