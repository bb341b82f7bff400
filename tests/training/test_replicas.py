"""A bit flips during training: the next comparison finds it, and what differs is not saved."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megasnn.checkpoint.folder import list_checkpoints
from megasnn.data import GlobalBatch
from megasnn.engine import Engine
from megasnn.kernels.layout import flat_in_memory
from megasnn.parallel.replica_check import ReplicaCheck, ReplicaError
from megasnn.telemetry.records import StepResult
from tests.training.runs import train

WEIGHT = "blocks.0.mlp.fc1.conv.weight"
SHARDED = "--use-distributed-optimizer"
TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", "7|1", "--pipeline-schedule", "1f1b")
FLAGS = ("--train-iters", "6", "--eval-iters", "0", "--neuron-backend", "torch")


def train_with_flip(faulty: int, name: str, cache: str, *flags: str) -> str:
    """The largest bit of the mantissa of a number flips before the fourth step. "" where nobody noticed."""
    step, compare = Engine.train_on, ReplicaCheck.__call__
    here = torch.distributed.get_rank() == faulty
    holds = []

    def flipped(self: Engine, batch: GlobalBatch) -> StepResult:
        if self.iteration == 3 and here:
            (entry,) = [entry for entry in holds[0]._entries() if entry.name == name]
            flat_in_memory(entry.tensor).view(torch.int32)[-1] ^= 1 << 22
        return step(self, batch)

    def kept(self: ReplicaCheck, iteration: int) -> None:
        holds[:] = [self]
        compare(self, iteration)

    with mock.patch.object(Engine, "train_on", flipped), mock.patch.object(ReplicaCheck, "__call__", kept):
        try:
            train(cache, *FLAGS, *flags)
        except ReplicaError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("flags", "size", "faulty", "name"),
    [
        ((), 2, 0, f"optimizer.exp_avg_sq.{WEIGHT}"),
        (("--precision", "bf16", SHARDED), 2, 1, "blocks.0.mlp.fc1.norm.running_var"),
        (PP2, 4, 3, "head.bias"),
    ],
    ids=["moment", "statistic-beside-owned-rows", "uneven-stages"],
)
def test_the_next_comparison_finds_it(ranks, tmp_path, flags, size, faulty, name) -> None:
    save = ("--save", str(tmp_path / "run"), "--save-interval", "1", "--check-replicas-interval", "2")
    texts = ranks(size, train_with_flip, faulty, name, str(tmp_path / "cache"), *flags, *save)
    assert len(set(texts)) == 1
    assert "replicas differ at iteration 4 (last agreed at iteration 3)" in texts[0] and f"- {name}: " in texts[0]
    assert list_checkpoints(tmp_path / "run") == [1, 2, 3]


@pytest.mark.parametrize(
    ("interval", "expected"),
    [(("2",), "at iteration 4 (last agreed at iteration 2)"), ((), "at iteration 6 (last agreed at iteration 0)")],
    ids=["interval", "end"],
)
def test_without_a_folder_to_save_in_too(ranks, tmp_path, interval, expected) -> None:
    flags = [f"--check-replicas-interval={n}" for n in interval]
    texts = ranks(2, train_with_flip, 1, WEIGHT, str(tmp_path), *flags)
    assert all(expected in text for text in texts)
