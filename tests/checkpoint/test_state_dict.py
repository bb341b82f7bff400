"""Weights in other programs' files are found whatever they are wrapped in; what is no such file is refused by name."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megasnn.checkpoint.state_dict import read_state_dict
from megasnn.files import CheckpointError

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
        with pytest.raises(CheckpointError, match=r"w\.pt"):
            read_state_dict(tmp_path / "w.pt")
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
