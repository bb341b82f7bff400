"""Weights of the published Spikformer compute the same in SpikingJelly's."""

from __future__ import annotations

import pytest
import torch
from spikingjelly.activation_based import functional
from spikingjelly.activation_based.model.spikformer import Spikformer
from torch import Tensor

from megasnn.files import CheckpointError
from megasnn.models.registry import dialect_for, dialect_of
from megasnn.models.spikformer.weight_names import SPIKINGJELLY
from megasnn.models.weight_names import values_of
from tests.checkpoint.published_spikformer import published

PATCH = {"cifar10": 4, "imagenet": 16}


def ours(kind: str) -> dict[str, Tensor]:
    weights = published(kind).state_dict()
    return values_of(dialect_of(weights).to_ours(weights), weights)


@pytest.mark.parametrize("kind", PATCH)
def test_spikingjellys_model_computes_the_same(kind):
    images = torch.rand(3, 3, 32, 32, dtype=torch.float64)
    twin = Spikformer(
        T=2, img_size_h=32, img_size_w=32, patch_size=PATCH[kind], num_classes=5, embed_dims=16, num_heads=2, depths=2
    )
    twin = twin.double().eval()
    mine = ours(kind)
    twin.load_state_dict(values_of(SPIKINGJELLY.from_ours(mine), mine), strict=True)
    functional.reset_net(twin)
    with torch.no_grad():
        expected = published(kind)(images)
        assert torch.allclose(twin(images), expected, rtol=1e-9, atol=1e-12)
    assert expected.std() > 1e-3  # something fires


def test_what_does_not_belong_is_refused():
    weights = published("imagenet").state_dict()
    with pytest.raises(CheckpointError, match=r"block\.1\.attn\.k_bn\.weight: missing"):
        dialect_of(weights).to_ours(weights.keys() - {"block.1.attn.k_bn.weight"})
    with pytest.raises(CheckpointError, match=r"block\.0\.attn\.relative: unexpected"):
        dialect_of(weights).to_ours({*weights, "block.0.attn.relative"})
    with pytest.raises(CheckpointError, match="scaled by 0.25"):
        dialect_of(weights).to_ours({*weights, "pos_embed"})
    with pytest.raises(CheckpointError, match="--names spikingjelly"):
        dialect_for("published", ours("cifar10")).from_ours(ours("cifar10"))
    with pytest.raises(CheckpointError, match="belong to no program known here"):
        dialect_of(["layer1.weight"])


def test_the_names_of_the_repositorys_first_file():
    """It counts the stages of the stem from one."""
    weights = {
        name.replace("proj_conv.", "proj_conv0.").replace("proj_bn.", "proj_bn0."): value
        for name, value in published("imagenet").state_dict().items()
    }
    for stage in range(4):
        for kind in ("conv", "bn"):
            old, new = f"patch_embed.proj_{kind}{stage}.", f"patch_embed.block{stage + 1}_{kind}."
            weights = {name.replace(old, new): value for name, value in weights.items()}
    weights = {
        name.replace("attn.proj_conv0.", "attn.proj_conv.").replace("attn.proj_bn0.", "attn.proj_bn."): value
        for name, value in weights.items()
    }
    assert "patch_embed.block1_conv.weight" in weights and "block.0.attn.proj_conv.weight" in weights
    tensors = values_of(dialect_of(weights).to_ours(weights), weights)
    assert all(torch.equal(tensors[name], value) for name, value in ours("imagenet").items())
