"""A checkpoint says of which model it is: a run of another one refuses it with both names, before anything is built."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from megasnn.checkpoint import CheckpointError, find_checkpoint, load_checkpoint, read_metadata, save_global_tensors
from megasnn.training import data, loop
from tests.checkpoint.crafted import as_format_2, seal, values_of
from tests.convert.saved import MODELS, build, identity, model_like, save_whole
from tests.training.runs import train

BOTH_NAMES = "it is a checkpoint of the model vgg_dvs, and this run trains spikformer"


def nothing(path: Path) -> None:
    """As it is written today."""


def without_its_name(path: Path) -> None:
    """As format 3 was before the name was kept."""
    values = values_of(path)
    del values["model"]
    seal(path, json.dumps(values, indent=2).encode())


AGES: dict[str, Callable[[Path], None]] = {
    "today": nothing,
    "without a name": without_its_name,
    "format 2": as_format_2,
}


def refuses(cache: str, *flags: str) -> str:
    """On one rank of a run: the error, when no data was opened and nothing was built until then."""
    with (
        mock.patch.object(data, "open_datasets", side_effect=AssertionError("data was opened")),
        mock.patch.object(loop, "Engine", side_effect=AssertionError("a model was built")),
        pytest.raises(CheckpointError) as raised,
    ):
        train(cache, "--train-iters", "1", *flags)
    return str(raised.value)


@pytest.mark.parametrize("age", AGES)
@pytest.mark.parametrize("more", [[], ["--finetune"], ["--ckpt-step", "100"]])
def test_a_run_of_another_model_is_refused(tmp_path, age, more) -> None:
    AGES[age](save_whole(tmp_path / "vgg", MODELS["vgg"]))
    error = refuses(str(tmp_path / "cache"), "--load", str(tmp_path / "vgg"), *more)
    assert error == f"--load {tmp_path / 'vgg'}: {BOTH_NAMES}"


def test_all_ranks_refuse_it(ranks, tmp_path) -> None:
    save_whole(tmp_path / "vgg", MODELS["vgg"])
    flags = ("--load", str(tmp_path / "vgg"), "--tensor-model-parallel-size", "2")
    assert ranks(2, refuses, str(tmp_path / "cache"), *flags) == [f"--load {tmp_path / 'vgg'}: {BOTH_NAMES}"] * 2


@pytest.mark.parametrize("age", AGES)
def test_its_own_model_goes_on_whenever_it_was_saved(tmp_path, age) -> None:
    cache, folder = str(tmp_path / "cache"), tmp_path / "run"
    train(cache, "--train-iters", "1", "--save", str(folder))
    path = find_checkpoint(folder, None)
    assert read_metadata(path).model == "spikformer"
    AGES[age](path)
    assert read_metadata(path).model == ("spikformer" if age == "today" else None)
    assert train(cache, "--train-iters", "2", "--load", str(folder), only_load=True).iteration == 1


def test_a_model_that_the_table_does_not_know_is_refused_by_its_name(tmp_path) -> None:
    save_global_tensors(tmp_path, {}, model="SomebodysNet")
    error = refuses(str(tmp_path / "cache"), "--load", str(tmp_path))
    assert "it is a checkpoint of the model SomebodysNet, and this run trains spikformer" in error


def test_what_is_wrong_otherwise_is_told_when_it_is_loaded(tmp_path) -> None:
    path = save_whole(tmp_path / "vgg", MODELS["vgg"])
    (path / "metadata.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds no checkpoint that is intact"):
        train(str(tmp_path / "cache"), "--train-iters", "1", "--load", str(tmp_path / "vgg"))


def test_a_folder_without_a_checkpoint_is_told_before_anything_is_built(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("megasnn.training.loop.Engine", None)
    with pytest.raises(CheckpointError, match="no folder .*absent"):
        train(str(tmp_path / "cache"), "--train-iters", "1", "--load", str(tmp_path / "absent"))


def test_loading_names_both_models_and_no_more(tmp_path) -> None:
    path = save_whole(tmp_path, MODELS["vgg"])
    rank = build(model_like(MODELS["spikformer"]))
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(tmp_path, tensors=rank.tensors, model="spikformer", config=identity(MODELS["spikformer"]))
    assert str(raised.value) == f"the checkpoint {path} does not fit this run:\n  {BOTH_NAMES}"


@pytest.mark.parametrize("name", ["", "1st", "a model", "x" * 65, "../x", "x\n"])
def test_a_name_that_could_not_be_read_is_not_written(tmp_path, name) -> None:
    with pytest.raises(CheckpointError, match="should be a letter, and up to 63"):
        save_global_tensors(tmp_path, {}, model=name)
    assert not list(tmp_path.glob("iter_*"))
