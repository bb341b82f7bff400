"""A rank that fails on one of two hosts, which are network namespaces here, ends those on the other one, too."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.launch import PP2, TINY, TP2, Host, Torchrun

HOSTS = {"first": "10.77.0.1", "second": "10.77.0.2"}
FLAGS = (*TINY, *PP2, *TP2, "--neuron-backend", "torch")


def can_make_hosts() -> bool:
    return os.geteuid() == 0 and all(shutil.which(program) for program in ("ip", "unshare"))


pytestmark = pytest.mark.skipif(not can_make_hosts(), reason="needs root, and the programs ip and unshare")


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    """A cable between two hosts."""
    try:
        for name in HOSTS:
            run("ip", "netns", "add", f"megasnn-{name}")
        run("ip", "link", "add", "megasnn0", "netns", "megasnn-first", "type", "veth", "peer", "name", "megasnn1",
            "netns", "megasnn-second")  # fmt: skip
        for number, (name, address) in enumerate(HOSTS.items()):
            inside = ("ip", "-n", f"megasnn-{name}")
            run(*inside, "addr", "add", f"{address}/24", "dev", f"megasnn{number}")
            for device in ("lo", f"megasnn{number}"):
                run(*inside, "link", "set", device, "up")
        yield
    finally:
        for name in HOSTS:
            subprocess.run(["ip", "netns", "delete", f"megasnn-{name}"], capture_output=True)


def started(folder: Path, fault: str, *flags: str) -> list[Torchrun]:
    """torchrun on each host, with two ranks; the fault is in the last rank, on the second host."""
    begun = []
    for number, (name, address) in enumerate(HOSTS.items()):
        where = ("--nnodes", "2", "--node-rank", str(number), "--local-addr", address)
        where += ("--master-addr", HOSTS["first"], "--master-port", "29511")
        host = Host(name, f"megasnn{number}", where)
        argv = [fault, "3", *FLAGS, *flags]
        begun.append(Torchrun(folder / name, 2, "tests/faults/driver.py", *argv, host=host))
    return begun


# A stopped rank takes a minute: torchrun gives it 30 seconds before it kills it.
@pytest.mark.parametrize("fault", ["raise_in_step", "kill", pytest.param("stop", marks=pytest.mark.matrix)])
def test_all_ranks_of_both_hosts_end(network, tmp_path, fault) -> None:
    flags = ("--distributed-timeout-minutes", "0.2") if fault == "stop" else ()
    hosts = started(tmp_path, fault if fault == "raise_in_step" else "stall_in_step", *flags)
    if fault == "raise_in_step":
        hosts[0].wait_for("iteration 1/", 120)
    else:
        hosts[1].kill_stalled(signal.SIGKILL if fault == "kill" else signal.SIGSTOP, 120)
    hosts[0].started = hosts[1].started = time.monotonic()
    limits = (17, 57) if fault == "stop" else (10, 20)
    first, second = (host.end(limit) for host, limit in zip(hosts, limits, strict=True))
    (told,), (told_second,) = first.output, second.output
    assert first.status == second.status == [1], (told, told_second)
    assert ", action " in told + told_second
    if fault == "raise_in_step":
        place = "rank 3, pipeline stage 1, action 1F1, micro-batch 1"
        assert told_second.count(place) == told.count(place) == 1, (told, told_second)
        assert f"because of rank 3 on second: RuntimeError {place}" in told
