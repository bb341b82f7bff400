"""A rank that fails on one of two hosts, which are network namespaces here, ends those on the other one, too."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.launch import PP2, ROOT, TINY, TP2, wait_for_pid

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


def started(folder: Path, fault: str, *flags: str) -> dict[str, subprocess.Popen[bytes]]:
    """torchrun on each host, with two ranks; the fault is in the last rank, on the second host."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "MEGASNN_TEST_PID_FILE": str(folder / "pid"),
    }
    found = {}
    for number, (name, address) in enumerate(HOSTS.items()):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
        torchrun += ["--node-rank", str(number), "--master-addr", HOSTS["first"], "--master-port", "29511"]
        torchrun += ["--local-addr", address, str(ROOT / "tests/faults/driver.py"), fault, "3", *FLAGS, *flags]
        renamed = ["sh", "-c", f'hostname {name} && exec "$@"', "sh", *torchrun]
        with open(folder / f"{name}.txt", "wb") as output:
            found[name] = subprocess.Popen(
                ["ip", "netns", "exec", f"megasnn-{name}", "unshare", "--uts", *renamed],
                env={**environment, "GLOO_SOCKET_IFNAME": f"megasnn{number}"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    return found


def wait_until(is_so: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


# A stopped rank takes a minute: torchrun gives it 30 seconds before it kills it.
@pytest.mark.parametrize("fault", ["raise_in_step", "kill", pytest.param("stop", marks=pytest.mark.matrix)])
def test_all_ranks_of_both_hosts_end(network, tmp_path, fault) -> None:
    flags = ("--distributed-timeout-minutes", "0.2") if fault == "stop" else ()
    hosts = started(tmp_path, fault if fault == "raise_in_step" else "stall_in_step", *flags)

    def told() -> str:
        return "\n".join(file.read_text() for file in sorted(tmp_path.glob("*.txt")))

    try:
        if fault == "raise_in_step":
            wait_until(lambda: "iteration 1/" in told(), 120, told)
        else:
            stalled = wait_for_pid(
                tmp_path / "pid", lambda: all(each.poll() is None for each in hosts.values()), told, 120
            )
            os.kill(stalled, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        limit = 10 if fault != "stop" else 12 + 5
        wait_until(lambda: hosts["first"].poll() is not None, limit, told)
        wait_until(lambda: hosts["second"].poll() is not None, 10 if fault != "stop" else 40, told)
    finally:
        for each in hosts.values():
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()
    text = told()
    assert all(each.returncode == 1 for each in hosts.values()), text
    first, second = ((tmp_path / f"{name}.txt").read_text() for name in HOSTS)
    assert ", action " in first + second
    if fault == "raise_in_step":
        place = "rank 3, pipeline stage 1, action 1F1, micro-batch 1"
        assert second.count(place) == first.count(place) == 1, text
        assert f"because of rank 3 on second: RuntimeError {place}" in first
