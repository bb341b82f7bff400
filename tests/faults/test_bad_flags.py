"""Flags that cannot work are refused with values and flags, and status 2; the first rank
of each machine says why."""

from __future__ import annotations

import time

import pytest

import pretrain_spikformer
from tests.faults.launch import TINY, lines_of

REFUSALS = {
    "world size": (
        ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"],
        6,
        ["size 6", "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--nproc-per-node"],
    ),
    "heads": (
        ["--tensor-model-parallel-size", "2", "--num-heads", "1", "--embed-dim", "32"],
        2,
        ["--num-heads 1", "--tensor-model-parallel-size 2"],
    ),
    "channels": (
        ["--tensor-model-parallel-size", "8", "--embed-dim", "32", "--num-heads", "8"],
        8,
        ["out_channels 4", "--tensor-model-parallel-size 8"],
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_with_values_and_flags_once(name, tmp_path, monkeypatch, capsys) -> None:
    flags, world_size, expected = REFUSALS[name]
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    folder = tmp_path / "run"
    started = time.monotonic()
    for rank in range(world_size):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        argv = [*TINY, *flags, "--save", str(folder), "--tensorboard-dir", str(folder)]
        assert pretrain_spikformer.main(argv) == 2
        text = capsys.readouterr().err
        if rank == 0:
            assert len(lines_of(0, text)) == 1 and all(part in text for part in expected), text
        else:
            assert text == ""
    assert not folder.exists()
    assert time.monotonic() - started < 10


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
