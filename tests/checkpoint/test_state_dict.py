"""Weights of other programs: found whatever they are wrapped in, and by published names; all else is refused."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from spikingjelly.activation_based.model.spikformer import Spikformer
from torch import Tensor

from megasnn.checkpoint.weight_file import read_state_dict, read_weights
from megasnn.common.files import CheckpointError
from megasnn.models.registry import dialect_for, dialect_of
from megasnn.models.spikformer.weight_names import SPIKINGJELLY
from megasnn.models.weight_names import NORM_TENSORS, translated_tensors

VALUES = {
    "conv.weight": torch.arange(24.0).reshape(2, 3, 4),
    "norm.running_mean": torch.randn(5).bfloat16(),
    "norm.num_batches_tracked": torch.tensor(7),
    "nothing": torch.zeros(0, 4),
}
ADAM = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 0.1}]}


def assert_read(path: Path) -> None:
    found = read_state_dict(path)
    assert found.keys() == VALUES.keys()
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in VALUES.items())


@pytest.mark.parametrize("content", [
    {"net": VALUES, "optimizer": ADAM, "epoch": 3, "args": argparse.Namespace(lr=0.1)},  # SpikingJelly's examples
    {"model": VALUES, "model_ema": VALUES},
    {"model": {"state_dict": {f"module.{name}": value for name, value in VALUES.items()}}},
    {f"_orig_mod.{name}": value for name, value in VALUES.items()},
], ids=range(4))  # fmt: skip
def test_it_is_found_in_what_it_is_wrapped_in(tmp_path, content):
    torch.save(content, tmp_path / "w.pt")
    assert_read(tmp_path / "w.pt")


def test_views_old_files_and_safetensors(tmp_path):
    base = torch.randn(6, 4)
    torch.save({"turned": base.t(), "part": base[1:3, 1:]}, tmp_path / "views.pt")
    found = read_state_dict(tmp_path / "views.pt")
    assert torch.equal(found["turned"], base.t()) and torch.equal(found["part"], base[1:3, 1:])
    torch.save(VALUES, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file(VALUES, tmp_path / "w.safetensors")
    assert_read(tmp_path / "old.pt")
    assert_read(tmp_path / "w.safetensors")
    torch.save({name: value for name, value in VALUES.items() if "num_batches" not in name}, tmp_path / "w.pt")
    assert read_state_dict(tmp_path / "w.pt")["norm.num_batches_tracked"] == 0


KNOWN = {**VALUES, "classifier.linear.weight": torch.ones(2, 2)}
"""With a name that every VGG has."""


def prefixed(prefix: str, factor: float = 1) -> dict[str, torch.Tensor]:
    return {prefix + name: value * factor for name, value in KNOWN.items()}


@pytest.mark.parametrize("prefix", ["net.", "model.backbone.", "_forward_module.module._orig_mod."])
def test_any_prefix_before_known_names_is_taken_off(tmp_path: Path, prefix: str) -> None:
    """Lightning's, Fabric's, and several around each other; what lies outside of the prefix is named."""
    content = {**prefixed(prefix), "criterion.weight": torch.zeros(3)}
    torch.save({"state_dict": content, "pytorch-lightning_version": "2.5", "epoch": 3}, tmp_path / "w.ckpt")
    file = read_weights(tmp_path / "w.ckpt")
    assert file.tensors.keys() == KNOWN.keys()
    assert all(torch.equal(file.tensors[name], value) for name, value in KNOWN.items())
    (notice,) = file.notices
    assert f"names without the prefix {prefix} are left out: criterion.weight" in notice


@pytest.mark.parametrize(
    "content",
    [
        {"state_dict": prefixed(""), "state_dict_ema": prefixed("module.", 2)},
        {"model": prefixed("module."), "model_ema": prefixed("", 2), "optimizer": ADAM},
        {"state_dict": {**prefixed("net."), **prefixed("ema_net.module.", 2)}},
    ],
    ids=["timm", "torchvision", "lightning"],
)
def test_an_average_beside_the_weights_is_told_and_chosen(tmp_path: Path, content: dict[str, object]) -> None:
    torch.save(content, tmp_path / "w.pt")
    for ema, factor, told in (
        (True, 2, r"takes the average.*\(--no-ema: the weights\)"),
        (False, 1, "takes the weights"),
    ):
        file = read_weights(tmp_path / "w.pt", ema)
        (notice,) = file.notices
        assert re.search(told, notice)
        assert all(torch.equal(file.tensors[name], factor * value) for name, value in KNOWN.items())


def test_torchs_averaged_model_is_an_average_alone(tmp_path: Path) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(3, 2))
    torch.save(averaged.state_dict(), tmp_path / "w.pt")
    for ema in (True, False):
        file = read_weights(tmp_path / "w.pt", ema)
        assert file.tensors.keys() == {"weight", "bias"}
        assert torch.equal(file.tensors["weight"], averaged.module.weight)
        assert file.notices == (
            f"{tmp_path / 'w.pt'} holds an average of the weights: takes the average of the weights (module.)",
        )


def test_several_averages_are_refused_by_name(tmp_path: Path) -> None:
    torch.save({"net": VALUES, "ema_fast": VALUES, "ema_slow": VALUES}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="several state_dicts .ema_fast, ema_slow"):
        read_state_dict(tmp_path / "w.pt")
    assert read_state_dict(tmp_path / "w.pt", ema=False).keys() == VALUES.keys()


class RunsCode:
    """A pickle of it calls a program when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("legacy", [False, True])
def test_nothing_in_a_file_is_run(tmp_path, legacy):
    for content in ({"w": RunsCode(tmp_path / "marker")}, torch.nn.Linear(1, 1)):
        torch.save(content, tmp_path / "w.pt", _use_new_zipfile_serialization=not legacy)
        with pytest.raises(CheckpointError, match=r"w\.pt: it holds .*(system|Linear), which would run code") as told:
            read_state_dict(tmp_path / "w.pt")
        assert not re.search("weights_only|safe_globals|PyTorch|trust", str(told.value))
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_cut_files_and_other_files_are_refused(tmp_path, name):
    path = tmp_path / name
    torch.save(VALUES, path) if name == "w.pt" else save_file(VALUES, path)
    content = path.read_bytes()
    for length in (0, 5, 200, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=name):
            read_state_dict(path)
    with pytest.raises(CheckpointError, match="absent"):
        read_state_dict(tmp_path / "absent")


@pytest.mark.parametrize(("content", "told"), [
    ({"weight": torch.zeros(2), "epoch": 3}, "epoch"),
    ({"teacher": {"w": torch.zeros(1)}, "student": VALUES}, "student, teacher"),
], ids=["none", "several"])  # fmt: skip
def test_a_file_without_one_dictionary_of_weights_is_refused(tmp_path, content, told):
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=told):
        read_state_dict(tmp_path / "w.pt")


def within_itself() -> dict[str, object]:
    content: dict[str, object] = {"epoch": {"weight": 1}}
    content["state"] = content
    return content


def many_times_over() -> dict[str, object]:
    """Twice the same in twice the same: 2^60 dictionaries for who opens each of them."""
    content: dict[str, object] = {"epoch": 1}
    for _ in range(60):
        content = {"a": content, "b": content}
    return content


@pytest.mark.parametrize(("content", "told"), [
    (within_itself(), "holds no state_dict"),
    (many_times_over(), "holds no state_dict"),
    ({"w": torch.eye(2).to_sparse()}, "w is sparse"),
    ({"w": torch.ones(2, device="meta")}, "w is without values"),
    (torch.jit.script(torch.nn.Linear(1, 1)), "TorchScript program: save its state_dict"),
    (b"<html>404</html>", "no file of torch.save"),
])  # fmt: skip
def test_absurd_contents_get_a_sentence(tmp_path, content, told):
    path = tmp_path / "w.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, torch.jit.ScriptModule):
        torch.jit.save(content, path)
    else:
        torch.save(content, path)
    with pytest.raises(CheckpointError, match=told) as refused:
        read_state_dict(path)
    assert not re.search("weights_only|safe_globals|PyTorch", str(refused.value))


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


@pytest.mark.parametrize("kind", PATCH)
def test_they_become_spikingjellys(kind: str) -> None:
    expected, weights = published(kind)
    mine = translated_tensors(dialect_of(weights).to_ours(weights), weights)
    found = translated_tensors(SPIKINGJELLY.from_ours(mine), mine)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-14, msg=name)


def test_what_does_not_belong_is_refused() -> None:
    _, weights = published("imagenet")
    for names, told in (
        (weights.keys() - {"block.1.attn.k_bn.weight"}, r"block\.1\.attn\.k_bn\.weight: missing"),
        ({*weights, "block.0.attn.relative"}, r"block\.0\.attn\.relative: unexpected"),
        ({*weights, "pos_embed"}, "pos_embed: unexpected"),
    ):
        with pytest.raises(CheckpointError, match=told):
            dialect_of(weights).to_ours(names)
    mine = translated_tensors(dialect_of(weights).to_ours(weights), weights)
    with pytest.raises(CheckpointError, match="--names spikingjelly"):
        dialect_for("published", mine).from_ours(mine)
    with pytest.raises(CheckpointError, match="belong to no program known here"):
        dialect_of(["layer1.weight"])
