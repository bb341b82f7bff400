"""What a run must not do behind its user's back: start anew by mistake, or go on with something else."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from megasnn.files import CheckpointError, NoCheckpointError
from tests.data.shard_files import numbered, write_shard
from tests.training.runs import train


def test_a_folder_named_by_mistake_is_refused_and_a_first_start_is_not(cache, tmp_path) -> None:
    with pytest.raises(NoCheckpointError, match="typo"):
        train(cache, "--train-iters", "1", "--load", str(tmp_path / "typo"))
    folder = str(tmp_path / "job")
    first = train(cache, "--train-iters", "2", "--exit-interval", "1", "--load", f"{folder}/", "--save", folder)
    second = train(cache, "--train-iters", "2", "--load", folder, "--save", folder)
    assert (first.iteration, second.iteration) == (1, 2)


def test_what_a_resumed_run_does_otherwise_is_told_or_refused(cache, tmp_path, capsys) -> None:
    folder = str(tmp_path)
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


def test_a_damaged_one_gives_way_to_the_one_before_unless_it_is_asked_for(cache, tmp_path, capsys) -> None:
    """One bit of the newest, and a model of other dimensions; neither changes what is there."""
    folder = tmp_path / "run"
    common = ("--train-iters", "2", "--eval-iters", "0", "--load", str(folder))
    train(cache, *common, "--save", str(folder), "--save-interval", "1")
    (file,) = (folder / "iter_0000002").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)
    before = contents(folder)
    capsys.readouterr()
    assert train(cache, *common, only_load=True).iteration == 1
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 1 and "damaged" in warnings[0]
    with pytest.raises(CheckpointError, match=f"iter_0000002/{file.name}"):
        train(cache, *common, "--ckpt-step", "2", "--save", str(folder))
    with pytest.raises(CheckpointError, match="embed_dim.*32.*64"):
        train(cache, *common, "--embed-dim", "64", "--save", str(folder))
    assert contents(folder) == before


def contents(folder: Path) -> dict[str, str]:
    """Files of the checkpoints and their hashes."""
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("iter_*/*")}
