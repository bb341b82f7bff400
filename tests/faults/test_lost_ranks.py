"""A rank that raises, is killed or is stopped ends all ranks, and its place is named once."""

from __future__ import annotations

import re
import signal
import socket
import time

import pytest

from tests.faults.driver import ASKED_AGAIN, LOST
from tests.faults.launch import PP2, PP3, TINY, TP2, Ranks, Torchrun, held_port, lines_of

QUICK = (*TINY, "--neuron-backend", "torch")  # nothing has to be compiled
PLACE = r"rank \d, pipeline stage \d, action "


@pytest.mark.parametrize(
    ("layout", "size", "fault", "faulty", "place"),
    [
        (PP3, 3, "raise_in_step", 2, "pipeline stage 2, action 2F1, micro-batch 1"),
        (("--pipeline-schedule", "zbv", *PP2[2:4]), 2, "raise_in_weight_gradient", 0, "pipeline stage 0, action 3W"),
    ],
    ids=["step", "weight gradient"],
)
def test_one_that_raises(tmp_path, layout, size, fault, faulty, place) -> None:
    ended = Ranks(tmp_path, size, *QUICK, *layout, fault=(fault, faulty)).end(40)
    assert ended.status == [1] * size
    tellers = [rank for rank, output in enumerate(ended.output) if "injected fault" in output]
    assert tellers == [faulty] and "".join(ended.output).count(place) == 1, ended.output
    assert place in ended.output[faulty].splitlines()[-1] and "injected fault" in ended.output[faulty].splitlines()[-1]


def test_one_whose_gpu_fails(tmp_path) -> None:
    """Beside a replica, with a trace and a save: told once by the rank itself, and nothing asks the GPU for more."""
    flags = ("--global-batch-size", "8", "--profile-step", "2", "--tensorboard-dir", str(tmp_path / "board"))
    flags += ("--save", str(tmp_path / "run"), "--save-interval", "1", "--async-save")
    ranks = Ranks(tmp_path, 2, *QUICK, *flags, fault=("lose_the_gpu", 1))
    ended = ranks.end(90)
    lost = float(ranks.pid_file.with_suffix(".lost").read_text())
    assert ended.status == [1, 1] and ranks.started + ended.seconds - lost < 10  # 5.02 was seen on two busy cores
    text, place = "".join(ended.output), "rank 1, pipeline stage 0, action 0F1, micro-batch 1"
    (line,) = (line for line in ended.output[1].splitlines() if place in line)
    assert line.endswith(f": AcceleratorError: {LOST}") and text.count(place) == text.count("Traceback") == 1, text
    assert ASKED_AGAIN not in text, "something asked the broken GPU, or hid its first error"


def test_one_that_is_killed(tmp_path) -> None:
    ranks = Ranks(tmp_path, 4, *QUICK, *PP2, *TP2, fault=("stall_in_step", 2))
    ranks.kill_stalled()
    ended = ranks.end(within=10)
    assert ended.status == [1, 1, -signal.SIGKILL, 1]
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


def test_all_ranks_of_both_hosts_end(tmp_path) -> None:
    """Of two torchruns with two ranks each, which end no ranks but their own. The last rank raises, and its torchrun
    prints what it has recorded, as the root cause."""
    argv = ("tests/faults/driver.py", "raise_in_step", "3", *QUICK, *PP2, *TP2)
    with held_port() as port:
        meeting = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port.getsockname()[1]))
        hosts = [Torchrun(tmp_path / host, 2, *argv, where=(*meeting, "--node-rank", host)) for host in ("0", "1")]
        hosts[0].wait_for("iteration 1/", 120)
        hosts[0].started = hosts[1].started = time.monotonic()
        first, second = hosts[0].end(10), hosts[1].end(20)
    (told,), (told_second,) = first.output, second.output
    assert first.status == second.status == [1], (told, told_second)
    place = "rank 3, pipeline stage 1, action 1F1, micro-batch 1"
    assert told_second.count(place) == told.count(place) == 1, (told, told_second)
    assert f"because of rank 3 on host1: RuntimeError {place}" in told
    root = told_second[told_second.index("Root Cause") :]
    assert ": 3 (local_rank: 1)" in root and "injected fault" in root
