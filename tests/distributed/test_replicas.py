"""Who is compared with whom, on real ranks, in every layout."""

from __future__ import annotations

import re
import socket

import pytest
import torch

from megasnn.checkpoint import optimizer_state
from megasnn.config.optimizer import OptimizerConfig
from megasnn.kernels.layout import flat_in_memory
from megasnn.models.build import describe_model
from megasnn.optim.build import build_optimizer
from megasnn.parallel.replica_check import ReplicaError, compare_replicas
from tests.parity.ranks import Layout, built, model_config

QKV = "blocks.0.attention.qkv.conv.weight"
WHOLE = "blocks.0.attention.qkv.norm.num_batches_tracked"
Flip = tuple[int, str]  # rank, tensor


def compare(tensor: int, pipeline: int, flips: list[Flip]) -> str:
    """What a comparison finds after flips of bits. Equal replicas are compared before the first step and after one."""
    with built(describe_model(model_config()), Layout(tensor=tensor, pipeline=pipeline), torch.float32) as engine:
        state, optimizer = engine.state, build_optimizer(engine.tensors, OptimizerConfig())

        def entries():
            return [*engine.tensors, *optimizer_state.describe_states(engine.tensors, optimizer.state)]

        compare_replicas(entries(), state, 2)
        for entry in engine.tensors:
            entry.tensor.grad = torch.ones_like(entry.tensor) if entry.is_parameter else None
        optimizer.step()
        compare_replicas(entries(), state, 3)
        for rank, name in flips:
            if rank == state.rank:
                (entry,) = [entry for entry in entries() if entry.name == name]
                flat_in_memory(entry.tensor).view(torch.uint8)[-1] ^= 0x40
        try:
            compare_replicas(entries(), state, 7)
        except ReplicaError as error:
            return str(error)
        return ""


@pytest.mark.parametrize(
    ("size", "tensor", "pipeline", "flip", "holders"),
    [
        (2, 2, 1, (0, WHOLE), {"0", "1"}),
        (4, 2, 1, (2, WHOLE), {"0, 1, 3", "2"}),
        (4, 2, 1, (2, f"optimizer.exp_avg.{QKV}"), {"0", "2"}),
        (4, 2, 1, (1, f"optimizer.step.{QKV}"), {"0, 2, 3", "1"}),
        (4, 1, 2, (2, QKV), {"2", "3"}),
    ],
)
def test_the_ranks_that_share_a_tensor_are_named(ranks, size, tensor, pipeline, flip, holders) -> None:
    told = ranks(size, compare, tensor, pipeline, [flip])
    assert len(set(told)) == 1
    _, line = told[0].splitlines()
    assert flip[1] in line and socket.gethostname() in line
    assert {", ".join(re.findall(r"(\d+) on ", held)) for held in line.split(" on rank ")[1:]} == holders
    assert (" from [0, 0" in line) == (tensor > 1 and "exp_avg" in flip[1])


def test_several_differences_are_all_named_and_equal_replicas_never_alarm(ranks) -> None:
    """Of three replicas two have a fault each, in different tensors; a weight, a moment and a number."""
    flips = [(1, QKV), (2, f"optimizer.exp_avg_sq.{QKV}"), (2, WHOLE), (2, f"optimizer.step.{QKV}")]
    for text in ranks(3, compare, 1, 1, flips):
        assert len(text.splitlines()) == 5 and all(f"- {name}: " in text for _, name in flips)
    assert ranks(6, compare, 1, 3, []) == [""] * 6  # with stages that have nothing
