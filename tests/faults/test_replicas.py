"""One bit flips in one replica: the run ends before it is saved and says where."""

from __future__ import annotations

import re

from megasnn.checkpoint.folder import list_checkpoints
from tests.faults.launch import TINY, TP2, Ranks

EACH = (*TINY, "--check-replicas-interval", "1", "--neuron-backend", "torch", "--save-interval", "1")
WEIGHT = "blocks.0.mlp.fc1.conv.weight"


def test_all_ranks_end_and_the_save_before_is_complete(tmp_path) -> None:
    """It may still be written in the background when the difference is found."""
    argv = [*EACH, *TP2, "--save", str(tmp_path / "run"), "--async-save"]
    ended = Ranks(tmp_path / "ranks", 4, *argv, fault=("flip_in_a_weight", 3)).end(60)
    assert ended.status == [1] * 4, ended.output
    assert not any("Traceback" in output for output in ended.output), ended.output
    told = [output for output in ended.output if f"- {WEIGHT}, part 1 by tp parallelism: " in output]
    assert told and all(re.search(r" on rank 1 on .*; \w+ on rank 3 on ", output) for output in told)
    for output in told:
        assert "ReplicaError: replicas differ at iteration 2 (last agreed at iteration 1); checksums of 1 te" in output
    assert list_checkpoints(tmp_path / "run") == [1] and not list((tmp_path / "run").glob("*.tmp"))
