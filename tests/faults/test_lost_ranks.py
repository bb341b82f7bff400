"""A rank that raises or is killed ends all ranks within seconds, with a launcher and without, and each says why."""

from __future__ import annotations

import signal
import time

import pytest

from megasnn.process.fault import GONE
from tests.faults.launch import PP2, PP3, TINY, Ranks, Torchrun, lines_of
from tests.faults.test_signals import wait_for


def one_line_each(output: list[str], ranks: list[int]) -> list[str]:
    """The line in which each of the ranks says why it ends; none says it twice."""
    lines = [lines_of(rank, output[rank]) for rank in ranks]
    assert all(len(found) == 1 for found in lines), output
    return [found[0] for found in lines]


@pytest.mark.parametrize("faulty", [0, 2])
def test_all_ranks_name_the_place_where_one_raised(tmp_path, faulty) -> None:
    ended = Ranks(tmp_path, 3, *TINY, *PP3, fault=("raise_in_step", faulty)).end(30)
    assert ended.status == [1, 1, 1]
    place = f"rank {faulty}, pipeline stage {faulty}, action {faulty}F1, micro-batch 1"
    others = [rank for rank in range(3) if rank != faulty]
    for line in one_line_each(ended.output, others):
        assert line.endswith(f"stopping, because of rank {faulty}: RuntimeError {place}")
    own = ended.output[faulty]
    assert own.count(f"[rank {faulty}] Traceback") == 1
    assert own.rstrip().endswith(f"{place}: RuntimeError: injected fault")


@pytest.mark.parametrize("schedule, faulty, action", [("zbv", 0, "3W1")])
def test_the_place_is_named_inside_a_split_backward(tmp_path, schedule, faulty, action) -> None:
    argv = ("--pipeline-schedule", schedule, "--pipeline-model-parallel-size", "2")
    ended = Ranks(tmp_path, 2, *TINY, *argv, fault=("raise_in_weight_gradient", faulty)).end(30)
    assert ended.status == [1, 1]
    place = f"rank {faulty}, pipeline stage {faulty}, action {action}, micro-batch 1"
    (line,) = one_line_each(ended.output, [1 - faulty])
    assert line.endswith(f"stopping, because of rank {faulty}: RuntimeError {place}")
    assert ended.output[faulty].rstrip().endswith(f"{place}: RuntimeError: injected fault")


@pytest.mark.parametrize("schedule", ["zbv"])
def test_a_slow_rank_is_waited_for(tmp_path, schedule) -> None:
    argv = ("--pipeline-schedule", schedule, "--pipeline-model-parallel-size", "2")
    ended = Ranks(tmp_path, 2, *TINY, *argv, fault=("slow_rank", 1)).end(30)
    assert ended.status == [0, 0] and "iteration 4/" in ended.output[0]


@pytest.mark.parametrize("killed, pipeline", [(0, PP3), (1, ("--pipeline-schedule", "v-min", *PP3[2:4]))])
def test_all_ranks_end_when_one_is_killed(tmp_path, killed, pipeline) -> None:
    ranks = Ranks(tmp_path, 3, *TINY, *pipeline, fault=("stall_in_step", killed))
    ranks.kill_stalled()
    ended = ranks.end(within=15)
    others = [rank for rank in range(3) if rank != killed]
    assert ended.status[killed] == -signal.SIGKILL and all(ended.status[rank] == 1 for rank in others)
    for rank, line in zip(others, one_line_each(ended.output, others), strict=True):
        # Where the others are tells what the lost one did not send any more.
        assert f"stopping, because of rank {killed}: {GONE}; here: rank {rank}, pipeline stage {rank}, action " in line
        assert ", micro-batch " in line


CUTS = ["samples", "rows"]


def shared_by(cut: str) -> tuple[str, ...]:
    return "--context-parallel-size", "2", "--context-parallel-cut", cut


@pytest.mark.parametrize("cut", CUTS)
def test_all_end_when_one_of_those_that_share_a_micro_batch_is_killed(tmp_path, cut) -> None:
    """The other one waits for its statistics, or its rows, in the middle of a layer."""
    ranks = Ranks(tmp_path, 2, *TINY, *shared_by(cut), fault=("stall_in_step", 1))
    ranks.kill_stalled()
    ended = ranks.end(within=15)
    assert ended.status == [1, -signal.SIGKILL]
    (line,) = one_line_each(ended.output, [0])
    assert f"stopping, because of rank 1: {GONE}; here: rank 0, pipeline stage 0, action 0F1, micro-batch 1" in line


def test_the_place_is_named_where_ranks_share_a_micro_batch(tmp_path) -> None:
    ended = Ranks(tmp_path, 2, *TINY, *shared_by("rows"), fault=("raise_in_step", 0)).end(30)
    assert ended.status == [1, 1]
    place = "rank 0, pipeline stage 0, action 0F1, micro-batch 1"
    (line,) = one_line_each(ended.output, [1])
    assert line.endswith(f"stopping, because of rank 0: RuntimeError {place}")
    assert ended.output[0].rstrip().endswith(f"{place}: RuntimeError: injected fault")


@pytest.mark.parametrize("cut", CUTS)
def test_a_slow_rank_that_shares_micro_batches_is_waited_for(tmp_path, cut) -> None:
    ended = Ranks(tmp_path, 2, *TINY, *shared_by(cut), fault=("slow_rank", 1)).end(30)
    assert ended.status == [0, 0] and "iteration 4/" in ended.output[0]


@pytest.mark.parametrize(
    ("fault", "faulty"),
    [
        ("raise_before_the_grid", 0),
        ("raise_at_the_end", 1),
        pytest.param("raise_before_the_grid", 1, marks=pytest.mark.matrix),
        pytest.param("raise_at_the_end", 0, marks=pytest.mark.matrix),
    ],
)
def test_before_and_after_the_training_too(tmp_path, fault, faulty) -> None:
    ended = Ranks(tmp_path, 2, *TINY, *PP2, fault=(fault, faulty)).end(30)
    assert ended.status == [1, 1]
    text = fault.removeprefix("raise_").replace("_", " ")
    early = fault == "raise_before_the_grid"
    place = "while making the groups of ranks" if early else f"on pipeline stage {faulty}, after iteration 4"
    lines = one_line_each(ended.output, [0, 1])
    assert lines[faulty] == f"[rank {faulty}] {place}: OSError: injected fault {text}"
    assert lines[1 - faulty].endswith(f"stopping, because of rank {faulty}: OSError {place}")


def test_a_rank_that_never_joins_is_waited_for_as_long_as_asked(tmp_path) -> None:
    argv = [*TINY, *PP2, "--distributed-timeout-minutes", "0.05"]
    ended = Ranks(tmp_path, 2, *argv, fault=("leave_before_joining", 1)).end(30)
    assert ended.status == [1, 0]
    (line,) = one_line_each(ended.output, [0])
    assert "the 2 ranks did not come together within --distributed-timeout-minutes 0.05" in line


def test_one_raises_under_torchrun(tmp_path) -> None:
    """The launcher stops the other ranks when one ends: by then all have spoken, the one with the error too."""
    faulty = 2
    argv = ["raise_in_step", str(faulty), *TINY, *PP3]
    run = Torchrun(tmp_path, 3, "tests/faults/driver.py", *argv)
    wait_for(run, "iteration 1/", 120)  # three ranks that import torch
    run.started = time.monotonic()
    ended = run.end(15)
    assert ended.status == [1]
    (text,) = ended.output
    place = f"rank {faulty}, pipeline stage {faulty}, action {faulty}F1, micro-batch 1"
    for rank in range(3):
        (line,) = lines_of(rank, text)
        assert line == f"[rank {rank}] " + (
            "Traceback (most recent call last):"
            if rank == faulty
            else f"stopping, because of rank {faulty}: RuntimeError {place}"
        )
    assert f"\n{place}: RuntimeError: injected fault\n" in text
    # What the launcher reports as the root cause is the rank that raised.
    assert f": {faulty} (local_rank: {faulty})" in text[text.index("Root Cause") :]
