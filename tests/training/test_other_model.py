"""A checkpoint says of which model it is: a run of another one refuses it with both names, before anything is built."""

from __future__ import annotations

from unittest import mock

import pytest

from megasnn.checkpoint.save import save_global_tensors
from megasnn.files import CheckpointError
from megasnn.training import data, loop
from tests.convert.saved import MODELS, save_whole
from tests.training.runs import train

BOTH_NAMES = "it is a checkpoint of the model vgg_dvs, and this run trains spikformer"


def refuses(cache: str, *flags: str) -> str:
    """On one rank of a run: the error, when no data was opened and nothing was built until then."""
    with (
        mock.patch.object(data, "open_datasets", side_effect=AssertionError("data was opened")),
        mock.patch.object(loop, "Engine", side_effect=AssertionError("a model was built")),
        pytest.raises(CheckpointError) as raised,
    ):
        train(cache, "--train-iters", "1", *flags)
    return str(raised.value)


@pytest.mark.parametrize("more", [[], ["--finetune"], ["--ckpt-step", "100"]])
def test_a_run_of_another_model_is_refused(tmp_path, more) -> None:
    save_whole(tmp_path / "vgg", MODELS["vgg"])
    error = refuses(str(tmp_path / "cache"), "--load", str(tmp_path / "vgg"), *more)
    assert error == f"--load {tmp_path / 'vgg'}: {BOTH_NAMES}"


def test_all_ranks_refuse_it(ranks, tmp_path) -> None:
    save_whole(tmp_path / "vgg", MODELS["vgg"])
    flags = ("--load", str(tmp_path / "vgg"), "--tensor-model-parallel-size", "2")
    assert ranks(2, refuses, str(tmp_path / "cache"), *flags) == [f"--load {tmp_path / 'vgg'}: {BOTH_NAMES}"] * 2


def test_a_model_that_the_table_does_not_know_is_refused_by_its_name(tmp_path) -> None:
    save_global_tensors(tmp_path, {}, model="SomebodysNet")
    error = refuses(str(tmp_path / "cache"), "--load", str(tmp_path))
    assert "it is a checkpoint of the model SomebodysNet, and this run trains spikformer" in error


def test_what_is_wrong_otherwise_is_told_when_it_is_loaded(tmp_path) -> None:
    path = save_whole(tmp_path / "vgg", MODELS["vgg"])
    (path / "metadata.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds no checkpoint that is intact"):
        train(str(tmp_path / "cache"), "--train-iters", "1", "--load", str(tmp_path / "vgg"))
