"""Who is compared with whom, on real ranks, in every layout."""

from __future__ import annotations

import re

import pytest
import torch

from megasnn.checkpoint.optimizer_state import describe
from megasnn.config.optimizer import OptimizerConfig
from megasnn.data_parallel import ReplicaCheck, ReplicaError
from megasnn.data_parallel.checksum import in_memory_order
from megasnn.grid import HOLDING_AXES
from megasnn.optim import build_optimizer
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from tests.parity.ranks import build_engine

QKV = "blocks.0.attention.qkv.conv.weight"
WHOLE = "blocks.0.attention.qkv.norm.num_batches_tracked"
Flip = tuple[int, str]  # rank, tensor


def compare(tensor: int, pipeline: int, flips: list[Flip], mends: bool, stepped: bool = True) -> tuple:
    """What one comparison says, then whether a second one agrees, and the bits that this rank then holds."""
    state = initialize_model_parallel(tensor, pipeline)
    try:
        engine = build_engine(state, "1f1b", torch.float32)
        optimizer = build_optimizer(engine.tensors, OptimizerConfig())
        if stepped:
            for entry in engine.tensors:
                entry.tensor.grad = torch.ones_like(entry.tensor) if entry.is_parameter else None
            optimizer.step()

        def entries():
            return [*engine.tensors, *describe(engine.tensors, optimizer.state)]

        check = ReplicaCheck(
            entries, {axis: state.group(axis) for axis in HOLDING_AXES}, state.world, state.device, mends
        )
        assert check(3) == "" and check.agreed == 3
        for rank, name in flips:
            if rank == state.rank:
                (entry,) = [entry for entry in entries() if entry.name == name]
                in_memory_order(entry.tensor).view(torch.uint8)[-1] ^= 0x40
        try:
            text = check(7)
        except ReplicaError as error:
            return str(error), check.agreed, None
        bits = {e.name: in_memory_order(e.tensor).view(torch.uint8).clone() for e in entries()}
        return text, check.agreed, (check(8), bits)
    finally:
        destroy_model_parallel()


@pytest.mark.parametrize(
    ("size", "tensor", "pipeline", "flip", "holders"),
    [
        (2, 1, 1, (1, QKV), {"0", "1"}),
        (2, 2, 1, (0, WHOLE), {"0", "1"}),
        (4, 2, 1, (2, WHOLE), {"0, 1, 3", "2"}),
        (4, 2, 1, (2, f"optimizer.exp_avg.{QKV}"), {"0", "2"}),
        (4, 2, 1, (1, f"optimizer.step.{QKV}"), {"0, 2, 3", "1"}),
        (4, 1, 2, (2, QKV), {"2", "3"}),
    ],
)
def test_the_ranks_that_share_a_tensor_are_named(ranks, size, tensor, pipeline, flip, holders) -> None:
    told = ranks(size, compare, tensor, pipeline, [flip], False)
    assert len({text for text, *_ in told}) == 1 and {agreed for _, agreed, _ in told} == {3}
    text = told[0][0]
    assert "replicas differ at iteration 7 (last agreed at iteration 3); checksums of 1 tensor(s):" in text
    assert f"  - {flip[1]}" in text and set(re.findall(r"rank\(s\) ([\d, ]+) hold", text)) == holders
    assert ("part 0 by tensor parallelism" in text) == (tensor > 1 and "exp_avg" in flip[1])


def test_the_minority_takes_exactly_the_bits(ranks) -> None:
    """Of three replicas two have a fault each, in different tensors; a weight, a moment and a number."""
    flips = [(1, QKV), (2, f"optimizer.exp_avg_sq.{QKV}"), (2, WHOLE), (2, f"optimizer.step.{QKV}")]
    undisturbed = ranks(3, compare, 1, 1, [], True)
    told = ranks(3, compare, 1, 1, flips, True)
    for (_, _, expected), (text, agreed, (again, bits)) in zip(undisturbed, told, strict=True):
        assert "4 tensor(s)" in text and "taken the majority's values" in text and (again, agreed) == ("", 7)
        assert bits.keys() == expected[1].keys()
        assert all(torch.equal(bits[name], expected[1][name]) for name in bits)


def test_parts_and_stages_are_mended_by_themselves(ranks) -> None:
    """Data 3 x tensor 2: a part has three holders, what is not cut has six."""
    flips = [(3, QKV), (4, WHOLE), (5, WHOLE)]
    told = ranks(6, compare, 2, 1, flips, True)
    assert all(again == "" for _, _, (again, _) in told)
    assert (
        "rank(s) 0, 1, 2, 3 hold" in told[0][0] and f"{QKV}, part 1 by tensor parallelism: rank(s) 1, 5" in told[0][0]
    )


def test_no_majority_ends_it(ranks) -> None:
    told = ranks(4, compare, 1, 1, [(1, QKV), (3, QKV)], True)
    assert all(bits is None and "(no majority)" in text for text, _, bits in told)


def test_equal_replicas_never_alarm(ranks) -> None:
    """Before the first step, and with stages that have nothing."""
    for size, tensor, pipeline in [(2, 2, 1), (4, 2, 2), (6, 1, 3)]:
        for stepped in (False, True):
            for text, agreed, (again, _) in ranks(size, compare, tensor, pipeline, [], False, stepped):
                assert (text, again, agreed) == ("", "", 7)
