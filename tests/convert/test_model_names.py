"""The converter says of which model weights are, keeps it, and tells it of those that do not say it."""

from __future__ import annotations

import json

import pytest
import torch

from megasnn.checkpoint import find_checkpoint, read_metadata
from megasnn.commands.convert_checkpoint import main
from megasnn.convert.opening import open_source
from tests.checkpoint.crafted import seal, values_of
from tests.convert.saved import MODELS, save_whole
from tests.training.test_other_model import without_its_name

NAMES = {"spikformer": "spikformer", "vgg": "vgg_dvs"}


@pytest.mark.parametrize("kind", MODELS)
def test_it_is_said_and_kept(tmp_path, capsys, kind) -> None:
    path, name = save_whole(tmp_path / "run", MODELS[kind]), NAMES[kind]
    for command in (["inspect"], ["verify"]):
        assert main([*command, str(path)]) == 0
        assert f"of the model {name}" in capsys.readouterr().out
    assert main(["inspect", str(path), "--json-output"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == name
    assert main(["reshard", "--load", str(path), "--save", str(tmp_path / "new")]) == 0
    assert open_source(tmp_path / "new").facts.model == name
    assert main(["export", "--load", str(tmp_path / "new"), "--output", str(tmp_path / "w.pt")]) == 0
    assert main(["import", "--input", str(tmp_path / "w.pt"), "--save", str(tmp_path / "start")]) == 0
    assert read_metadata(find_checkpoint(tmp_path / "start", None)).model == name


@pytest.mark.parametrize("kind", MODELS)
def test_it_is_told_by_the_tensors_of_a_checkpoint_that_does_not_say_it(tmp_path, capsys, kind) -> None:
    path = save_whole(tmp_path / "old", MODELS[kind])
    without_its_name(path)
    assert main(["inspect", str(path)]) == 0 and "of the model" not in capsys.readouterr().out
    assert main(["export", "--load", str(path), "--output", str(tmp_path / "w.pt")]) == 0
    assert main(["reshard", "--load", str(path), "--save", str(tmp_path / "new")]) == 0
    assert read_metadata(find_checkpoint(tmp_path / "new", None)).model == NAMES[kind]


def test_a_configuration_that_cannot_be_is_refused_before_its_layers_are_counted_out(tmp_path, capsys) -> None:
    path = save_whole(tmp_path / "run", MODELS["spikformer"])
    values = values_of(path)
    values["config"]["model"]["depth"] = 10**12
    seal(path, json.dumps(values, indent=2).encode())
    assert main(["reshard", "--load", str(path), "--save", str(tmp_path / "new")]) == 2
    assert "there is no model spikformer like this" in (text := capsys.readouterr().err) and "--depth" in text


def test_weights_of_no_model_are_refused(tmp_path, capsys) -> None:
    torch.save({"layer1.weight": torch.zeros(2)}, tmp_path / "w.pt")
    assert main(["reshard", "--load", str(tmp_path / "w.pt"), "--save", str(tmp_path / "new")]) == 2
    assert "belong to no program known here" in capsys.readouterr().err
