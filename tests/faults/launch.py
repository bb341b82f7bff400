"""Starts the pretraining program as several ranks, with torchrun or without, and looks at how it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.forking import forking

ROOT = Path(__file__).parents[2]
TINY = (
    *("--embed-dim", "32", "--depth", "1", "--num-heads", "4", "--time-steps", "2"),
    *("--image-size", "8", "--patch-size", "4", "--in-channels", "1", "--num-classes", "10"),
    *("--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", "4"),
    *("--log-interval", "1", "--eval-iters", "0"),
)
ONE_F_ONE_B = ("--pipeline-schedule", "1f1b")
PP2 = (*ONE_F_ONE_B, "--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", "5|3")
PP3 = (*ONE_F_ONE_B, "--pipeline-model-parallel-size", "3", "--pipeline-model-parallel-layout", "4|2|2")
TP2 = ("--tensor-model-parallel-size", "2")
_PR_SET_PDEATHSIG = 1  # of Linux, prctl(2)


@dataclass
class Ended:
    """How a run ended.

    Attributes:
        status: the exit status of each rank (negative: the signal that ended it); of torchrun, its own.
        output: what each rank wrote, or torchrun with all ranks.
        seconds: from the start, or from the kill, to the end of the last process.
    """

    status: list[int]
    output: list[str]
    seconds: float


class Ranks:
    """Ranks without a launcher: when one ends, nobody ends the others but they themselves.

    They are forked from a server that has imported torch once, and write to a file each.

    Args:
        argv: the program's flags.
        fault: name and rank of a fault of tests.faults.driver.
        more: further environment of all ranks.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        *argv: str,
        fault: tuple[str, int] | None = None,
        more: dict[str, str] | None = None,
    ) -> None:
        context = forking()
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.pid_file = folder, folder / "pid"
        self.files = [folder / f"rank{rank}.txt" for rank in range(size)]
        self.started = time.monotonic()
        self._port = held_port()
        _running.append(self)
        environment = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port.getsockname()[1]),
            "MEGASNN_CACHE": os.environ["MEGASNN_CACHE"],
            "MEGASNN_TEST_PID_FILE": str(self.pid_file),
            **(more or {}),
        }
        self.processes = []
        for rank, file in enumerate(self.files):
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(target=_rank, args=(file, own, list(argv), fault), daemon=True)
            process.start()
            self.processes.append(process)

    def kill_stalled(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Waits until a rank has stalled, and sends it a signal."""
        process = wait_for_pid(self.pid_file, lambda: all(p.is_alive() for p in self.processes), self.output)
        self.started = time.monotonic()
        os.kill(process, number)

    def output(self) -> str:
        return "\n".join(file.read_text() for file in self.files if file.exists())

    def end(self, within: float = 15.0) -> Ended:
        """Waits for all ranks. Raises AssertionError when one is alive after `within` seconds."""
        deadline = self.started + within
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        alive = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        seconds = time.monotonic() - self.started
        self.kill()
        assert not alive, f"ranks {alive} still run after {within} s:\n{self.output()}"
        return Ended([process.exitcode for process in self.processes], [f.read_text() for f in self.files], seconds)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self._port.close()


def _rank(file: Path, environment: dict[str, str], argv: list[str], fault: tuple[str, int] | None) -> None:
    _end_with_parent(signal.SIGKILL)
    os.environ.update(environment)
    _write_to(file)
    import torch

    torch.set_num_threads(1)
    from tests.faults import driver

    if fault is not None and fault[1] == int(environment["RANK"]):
        driver.FAULTS[fault[0]]()
    sys.exit(driver.pretrain_spikformer.main(argv))


class Torchrun:
    """The program under torchrun, which is forked from the same server; everything that they write goes to one file.

    The ranks are processes that torchrun starts, as always.
    """

    def __init__(self, folder: Path, size: int, program: str, *argv: str, restarts: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file, self.pid_file = folder / "output.txt", folder / "pid"
        flags = ["--standalone", "--nproc-per-node", str(size), "--max-restarts", str(restarts)]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "MEGASNN_TEST_PID_FILE": str(self.pid_file),
        }
        context = forking()
        self.file.touch()
        self.started = time.monotonic()
        _running.append(self)
        self.process = context.Process(
            target=_torchrun, args=(self.file, environment, [*flags, str(ROOT / program), *argv])
        )
        self.process.start()

    def kill_stalled(self, number: signal.Signals = signal.SIGKILL) -> None:
        process = wait_for_pid(self.pid_file, self.process.is_alive, self.file.read_text)
        self.started = time.monotonic()
        os.kill(process, number)

    def output(self) -> str:
        return self.file.read_text()

    def end(self, within: float) -> Ended:
        self.process.join(max(0.0, self.started + within - time.monotonic()))
        if self.process.is_alive():
            self.kill()
            raise AssertionError(f"still runs after {within} s:\n{self.file.read_text()}")
        return Ended([self.process.exitcode], [self.file.read_text()], time.monotonic() - self.started)

    def kill(self) -> None:
        """The launcher and its ranks, each of which has a session of its own."""
        if self.process.is_alive():
            children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
            for process in (self.process.pid, *(int(child) for file in children for child in file.read_text().split())):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self.process.join()


def _torchrun(file: Path, environment: dict[str, str], argv: list[str]) -> None:
    _end_with_parent(signal.SIGTERM)
    os.setsid()
    os.chdir(file.parent)
    os.environ.clear()
    os.environ.update(environment)
    _write_to(file)
    from torch.distributed.run import main

    main(argv)


def _write_to(file: Path) -> None:
    """All that this process and those that it starts write."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


_running: list[Ranks | Torchrun] = []


def kill_all() -> None:
    """Whatever a test has started and, since it failed, not waited for."""
    while _running:
        _running.pop().kill()


def _end_with_parent(number: signal.Signals) -> None:
    """This process gets the signal when the one that started it ends, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def wait_for_pid(file: Path, alive: Callable[[], bool], output: Callable[[], str], seconds: float = 60.0) -> int:
    deadline = time.monotonic() + seconds
    while not file.exists():
        assert alive() and time.monotonic() < deadline, f"no rank stalled:\n{output()}"
        time.sleep(0.02)
    return int(file.read_text())


def held_port() -> socket.socket:
    """A socket with a port that no other program is given while it is open.

    Rank 0 can listen on that port all the same: neither socket refuses to share it, and this one never listens.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


def lines_of(rank: int, output: str) -> list[str]:
    """The lines that a rank wrote under its name."""
    return [line for line in output.splitlines() if line.startswith(f"[rank {rank}] ")]
