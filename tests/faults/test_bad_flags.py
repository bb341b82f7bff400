"""Flags that cannot work are refused with values and flags, and status 2; the first rank of each machine says why."""

from __future__ import annotations

import time

import pytest

import pretrain_spikformer
from tests.faults.launch import TINY, lines_of

REFUSED = [
    ("--tensor-model-parallel-size 8 --embed-dim 64", ["--num-heads 4", "--tensor-model-parallel-size 8"]),
    ("--tensor-model-parallel-size 8 --num-heads 8", ["out_channels 4", "--tensor-model-parallel-size 8"]),
]


@pytest.mark.parametrize(("flags", "expected"), REFUSED)
def test_refused_with_values_and_flags_once(flags, expected, tmp_path, monkeypatch, capsys) -> None:
    folder, told = tmp_path / "run", []
    monkeypatch.setenv("WORLD_SIZE", "8")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        argv = [*TINY, *flags.split(), "--save", str(folder), "--tensorboard-dir", str(folder)]
        assert pretrain_spikformer.main(argv) == 2 and not folder.exists()
        told.append(capsys.readouterr().err)
    assert len(lines_of(0, told[0])) == 1 and all(part in told[0] for part in expected) and told[1] == "", told


def test_under_torchrun_the_other_ranks_wait_for_the_message(monkeypatch, capsys) -> None:
    """torchrun ends all ranks as soon as one has ended, and would end the one that speaks before it has spoken."""
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "1"), ("TORCHELASTIC_RUN_ID", "run")):
        monkeypatch.setenv(name, value)
    started = time.monotonic()
    assert pretrain_spikformer.main([*TINY, "--num-heads", "3"]) == 2 and capsys.readouterr().err == ""
    assert time.monotonic() - started > 2


def test_each_machine_hears_of_its_own_command_line(monkeypatch, capsys) -> None:
    """Rank 0 may have been given flags that are right."""
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert pretrain_spikformer.main([*TINY, "--num-heads", "3"]) == 2
    assert "[rank 1] " in (text := capsys.readouterr().err) and "--num-heads 3" in text
