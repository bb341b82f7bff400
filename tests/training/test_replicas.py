"""A bit flips during training: the next comparison finds it, and what differs is not saved."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megasnn.checkpoint.folder import list_checkpoints
from megasnn.data import GlobalBatch
from megasnn.engine import Engine
from megasnn.kernels.layout import flat_in_memory
from megasnn.parallel.replica_check import ReplicaError
from megasnn.telemetry.records import StepResult
from tests.training.runs import train

WEIGHT = "blocks.0.mlp.fc1.conv.weight"
SHARDED = "--use-distributed-optimizer"
HALVES = ("--weight-parallel-size", "2", "--micro-batch-size", "2", "--global-batch-size", "8")
FLAGS = ("--train-iters", "6", "--eval-iters", "0", "--neuron-backend", "torch")
SAVES = ("--save-interval", "1", "--check-replicas-interval", "2", "--save")


def train_with_flip(faulty: int, name: str, cache: str, *flags: str) -> str:
    """The largest bit of the mantissa of a number flips before the fourth step. "" where nobody noticed."""
    step = Engine.train_on
    here = torch.distributed.get_rank() == faulty

    def flipped(self: Engine, batch: GlobalBatch) -> StepResult:
        if self.iteration == 3 and here:
            (entry,) = [entry for entry in self.checkpoints.entries() if entry.name == name]
            flat_in_memory(entry.tensor).view(torch.int32)[-1] ^= 1 << 22
        return step(self, batch)

    with mock.patch.object(Engine, "train_on", flipped):
        try:
            train(cache, *FLAGS, *flags)
        except ReplicaError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("flags", "size", "faulty", "name", "part"),
    [
        ((), 2, 0, f"optimizer.exp_avg_sq.{WEIGHT}", ""),
        (("--precision", "bf16", SHARDED), 2, 1, "blocks.0.mlp.fc1.norm.running_var", ""),
        ((*HALVES, "--async-save"), 4, 3, WEIGHT, ", part 1 by dp_shard parallelism"),
    ],
    ids=["moment", "statistic-beside-owned-rows", "halves-of-weights"],
)
def test_the_next_comparison_finds_it(ranks, cache, tmp_path, flags, size, faulty, name, part) -> None:
    save = (*SAVES, str(tmp_path / "run"))
    texts = ranks(size, train_with_flip, faulty, name, cache, *flags, *save)
    assert len(set(texts)) == 1
    assert "replicas differ at iteration 4 (last agreed at iteration 3)" in texts[0] and f"- {name}{part}: " in texts[0]
    assert list_checkpoints(tmp_path / "run") == [1, 2, 3] and not list((tmp_path / "run").glob("*.tmp"))


def test_it_is_found_at_the_end_without_a_folder_to_save_in(ranks, cache) -> None:
    texts = ranks(2, train_with_flip, 1, WEIGHT, cache)
    assert all("at iteration 6 (last agreed at iteration 0)" in text for text in texts)
