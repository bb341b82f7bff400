"""A checkpoint says of which model it is: a run of another one refuses it with both names."""

from __future__ import annotations

import pytest

from megasnn.checkpoint.save import save_global_tensors
from megasnn.files import CheckpointError
from tests.convert.saved import MODELS, save_whole
from tests.training.runs import train

BOTH_NAMES = "it is a checkpoint of the model vgg_dvs, and this run trains spikformer"


def refuses(cache: str, *flags: str) -> str:
    """On one rank of a run: the error."""
    with pytest.raises(CheckpointError) as raised:
        train(cache, "--train-iters", "1", *flags)
    return str(raised.value)


@pytest.mark.parametrize("more", [[], ["--finetune"], ["--ckpt-step", "100"]])
def test_a_run_of_another_model_is_refused(tmp_path, more) -> None:
    save_whole(tmp_path / "vgg", MODELS["vgg"])
    error = refuses(str(tmp_path / "cache"), "--load", str(tmp_path / "vgg"), *more)
    assert str(tmp_path / "vgg") in error and BOTH_NAMES in error


def test_a_model_that_the_table_does_not_know_is_refused_by_its_name(tmp_path) -> None:
    save_global_tensors(tmp_path, {}, model="SomebodysNet")
    error = refuses(str(tmp_path / "cache"), "--load", str(tmp_path))
    assert "it is a checkpoint of the model SomebodysNet, and this run trains spikformer" in error


def test_what_is_wrong_otherwise_is_told_when_it_is_loaded(tmp_path) -> None:
    path = save_whole(tmp_path / "vgg", MODELS["vgg"])
    (path / "metadata.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds no checkpoint that is intact"):
        train(str(tmp_path / "cache"), "--train-iters", "1", "--load", str(tmp_path / "vgg"))
