"""A rank that raises, is killed or is stopped ends all ranks, and its place is named once."""

from __future__ import annotations

import re
import signal
import socket
import time

import pytest

from tests.data.shard_files import numbered, write_shard
from tests.faults.launch import PP2, PP3, TINY, TP2, Ranks, Torchrun, lines_of
from tests.faults.test_signals import wait_for

QUICK = (*TINY, "--neuron-backend", "torch")  # nothing has to be compiled
PLACE = r"rank \d, pipeline stage \d, action "
SHARED = ("--context-parallel-size", "2", "--context-parallel-cut", "rows")


@pytest.mark.parametrize(
    ("layout", "size", "fault", "faulty", "place"),
    [
        (PP3, 3, "raise_in_step", 2, "pipeline stage 2, action 2F1, micro-batch 1"),
        (("--pipeline-schedule", "zbv", *PP2[2:4]), 2, "raise_in_weight_gradient", 0, "pipeline stage 0, action 3W1"),
        (PP2, 2, "raise_in_save", 1, "while saving, on pipeline stage 1, after iteration 2"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("raise") else None,
)
def test_one_that_raises(tmp_path, layout, size, fault, faulty, place) -> None:
    save = ("--save", str(tmp_path / "run"), "--save-interval", "2") if fault == "raise_in_save" else ()
    ended = Ranks(tmp_path / "ranks", size, *QUICK, *layout, *save, fault=(fault, faulty)).end(40)
    assert ended.status == [1] * size
    tellers = [rank for rank, output in enumerate(ended.output) if "injected fault" in output]
    assert tellers == [faulty] and "".join(ended.output).count(place) == 1, ended.output
    assert place in ended.output[faulty].splitlines()[-1] and "injected fault" in ended.output[faulty].splitlines()[-1]


def test_a_mistake_has_no_traceback(tmp_path) -> None:
    """Each rank finds the one in the data by itself, and the first one tells it."""
    argv = [*QUICK, *PP3, "--data-path", str(tmp_path / "absent.tar")]
    output = "".join(Ranks(tmp_path, 3, *argv).end(40).output)
    assert output.count("absent.tar") == output.count("while opening the data") == 1 and "Traceback" not in output


def test_a_worker_of_one_rank(tmp_path) -> None:
    shard = write_shard(tmp_path / "train-00000.tar", numbered(range(8)))
    shard.write_bytes(b"")
    output = "".join(Ranks(tmp_path / "ranks", 2, *QUICK, *PP2, "--data-path", str(shard)).end(60).output)
    assert output.count("train-00000.tar") == 1, output


@pytest.mark.parametrize(
    ("layout", "size", "lost"),
    [((*PP2, *TP2), 4, 2), (SHARED, 2, 1)],
    ids=["stages", "rows"],
)
def test_one_that_is_killed(tmp_path, layout, size, lost) -> None:
    ranks = Ranks(tmp_path, size, *QUICK, *layout, fault=("stall_in_step", lost))
    ranks.kill_stalled()
    ended = ranks.end(within=10)
    others = [status for rank, status in enumerate(ended.status) if rank != lost]
    assert ended.status[lost] == -signal.SIGKILL and others == [1] * (size - 1)
    assert len(re.findall(PLACE, "".join(ended.output))) == 1, ended.output


def test_one_that_is_stopped_is_noticed_by_the_timeout(tmp_path) -> None:
    flags = ("--distributed-timeout-minutes", "0.1")
    ranks = Ranks(tmp_path, 4, *QUICK, *PP2, *TP2, *flags, fault=("stall_in_step", 3))
    ranks.kill_stalled(signal.SIGSTOP)
    deadline = time.monotonic() + 20
    while any(process.is_alive() for process in ranks.processes[:3]):
        assert time.monotonic() < deadline, ranks.output()
        time.sleep(0.05)
    assert [process.exitcode for process in ranks.processes[:3]] == [1] * 3
    assert len(re.findall(PLACE, ranks.output())) == 1, ranks.output()


def test_a_slow_rank_is_waited_for(tmp_path) -> None:
    ended = Ranks(tmp_path, 2, *QUICK, "--pipeline-schedule", "zbv", *PP2[2:4], fault=("slow_rank", 1)).end(40)
    assert ended.status == [0, 0] and "iteration 4/" in ended.output[0]


def test_a_rank_that_never_joins_is_waited_for_as_long_as_asked(tmp_path) -> None:
    argv = [*TINY, *PP2, "--distributed-timeout-minutes", "0.05"]
    ended = Ranks(tmp_path, 2, *argv, fault=("leave_before_joining", 1)).end(30)
    assert ended.status == [1, 0] and ended.output[0].count("--distributed-timeout-minutes 0.05") == 1


def test_a_port_that_another_program_holds_ends_all_ranks(tmp_path) -> None:
    """It takes connections and never answers: torch would wait for it without an end."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = {"MASTER_PORT": str(other.getsockname()[1])}
        ended = Ranks(tmp_path, 2, *QUICK, *PP2, "--distributed-timeout-minutes", "0.05", more=port).end(30)
    assert ended.status == [1, 1]
    for rank, output in enumerate(ended.output):
        assert lines_of(rank, output) and f"127.0.0.1:{port['MASTER_PORT']}" in output, output


def test_under_torchrun(tmp_path) -> None:
    """It prints what the rank has recorded, as the root cause."""
    run = Torchrun(tmp_path, 2, "tests/faults/driver.py", "raise_in_step", "1", *QUICK, *PP2)
    wait_for(run, "iteration 1/", 120)  # ranks that import torch
    run.started = time.monotonic()
    ended = run.end(10)
    (text,) = ended.output
    assert ended.status == [1] and len(re.findall(PLACE, text)) == 1, text
    root = text[text.index("Root Cause") :]
    assert ": 1 (local_rank: 1)" in root and "injected fault" in root
