"""What a run must not do behind its user's back: start anew by mistake, or go on with something else."""

from __future__ import annotations

import pytest

from megasnn.files import CheckpointError, NoCheckpointError
from tests.data.shard_files import numbered, write_shard
from tests.training.runs import train


def test_a_folder_named_by_mistake_is_refused_and_a_first_start_is_not(tmp_path_factory, tmp_path) -> None:
    cache = str(tmp_path_factory.mktemp("cache"))
    with pytest.raises(NoCheckpointError, match="typo"):
        train(cache, "--train-iters", "1", "--load", str(tmp_path / "typo"))
    folder = str(tmp_path / "job")
    first = train(cache, "--train-iters", "2", "--exit-interval", "1", "--load", f"{folder}/", "--save", folder)
    second = train(cache, "--train-iters", "2", "--load", folder, "--save", folder)
    assert (first.iteration, second.iteration) == (1, 2)


def test_what_a_resumed_run_does_otherwise_is_told_or_refused(tmp_path_factory, tmp_path, capsys) -> None:
    cache, folder = str(tmp_path_factory.mktemp("cache")), str(tmp_path)
    train(cache, "--train-iters", "2", "--exit-interval", "1", "--eval-iters", "0", "--save", folder)
    capsys.readouterr()
    again = ("--train-iters", "2", "--eval-iters", "0", "--load", folder)
    train(cache, *again)
    assert "changed since" not in capsys.readouterr().out
    train(cache, *again, "--loss", "mse", "--augment", "cifar")
    printed = capsys.readouterr().out
    assert "WARNING: changed since the checkpoint was saved: --loss from cross-entropy to mse, --augment" in printed
    with pytest.raises(CheckpointError, match="last_batch: continue when it was saved, drop now"):
        train(cache, *again, "--last-batch", "drop")
    with pytest.raises(CheckpointError, match="seed"):
        train(cache, *again, "--seed", "7")
    write_shard(tmp_path / "train-00000.tar", numbered(range(8)))
    with pytest.raises(CheckpointError, match="dataset"):
        train(cache, *again, "--data-path", str(tmp_path / "train-00000.tar"))
    with pytest.raises(CheckpointError, match="--load"):
        train(cache, "--train-iters", "2", "--save", folder)
