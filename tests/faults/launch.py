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
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.forking import forking

ROOT = Path(__file__).parents[2]
TINY = (
    *("--embed-dim", "32", "--depth", "1", "--num-heads", "4", "--time-steps", "2"),
    *("--image-size", "8", "--patch-size", "4", "--in-channels", "1", "--num-classes", "10"),
    *("--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", "4"),
    *("--log-interval", "1", "--eval-iters", "0"),
)
ENDLESS = ("--train-iters", "100000")
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

    status: list[int | None]
    output: list[str]
    seconds: float


class Running:
    """Processes that write to a file each.

    Attributes:
        pid_file: a rank with a fault writes its process id there.
        started: the time from which `end` counts.
    """

    def __init__(self, folder: Path, processes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.pid_file = folder, folder / "pid"
        self.files = [folder / f"output{number}.txt" for number in range(processes)]
        self.processes: list[BaseProcess] = []
        self.started = time.monotonic()
        _running.append(self)

    def output(self) -> str:
        return "\n".join(file.read_text() for file in self.files if file.exists())

    def wait_for(self, text: str, seconds: float = 40.0) -> None:
        deadline = time.monotonic() + seconds
        while text not in (output := self.output()):
            assert time.monotonic() < deadline, f"{text!r} did not appear:\n{output}"
            time.sleep(0.02)

    def kill(self, number: signal.Signals, *which: int) -> None:
        """Sends a signal to some of the processes."""
        self.started = time.monotonic()
        for index in which:
            os.kill(self.processes[index].pid, number)

    def kill_stalled(self, number: signal.Signals = signal.SIGKILL, seconds: float = 60.0) -> None:
        """Waits until a rank has stalled, and sends it a signal."""
        deadline = time.monotonic() + seconds
        while not self.pid_file.exists():
            alive = all(process.is_alive() for process in self.processes)
            assert alive and time.monotonic() < deadline, f"no rank stalled:\n{self.output()}"
            time.sleep(0.02)
        self.started = time.monotonic()
        os.kill(int(self.pid_file.read_text()), number)

    def end(self, within: float = 15.0) -> Ended:
        """Waits for all processes. Raises AssertionError when one is alive after `within` seconds."""
        for process in self.processes:
            process.join(max(0.0, self.started + within - time.monotonic()))
        alive = [index for index, process in enumerate(self.processes) if process.is_alive()]
        seconds = time.monotonic() - self.started
        self.close()
        assert not alive, f"{alive} still run after {within} s:\n{self.output()}"
        status = [process.exitcode for process in self.processes]
        return Ended(status, [file.read_text() for file in self.files], seconds)

    def close(self) -> None:
        """Ends all processes and their children: a launcher's ranks have sessions of their own."""
        for process in self.processes:
            if process.is_alive():
                children = Path(f"/proc/{process.pid}/task").glob("*/children")
                for child in [int(child) for file in children for child in file.read_text().split()]:
                    with suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
                process.kill()
            process.join()


class Ranks(Running):
    """Ranks without a launcher: when one ends, nobody ends the others but they themselves.

    They are forked from a server that has imported torch once.

    Args:
        argv: the program's flags.
        target: runs instead of the program.
        fault: name and rank of a fault of tests.faults.driver.
        more: further environment of all ranks.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        *argv: str,
        target: Callable[[], None] | None = None,
        fault: tuple[str, int] | None = None,
        more: dict[str, str] | None = None,
    ) -> None:
        super().__init__(folder, size)
        self._port = held_port()
        environment = {
            **os.environ,
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port.getsockname()[1]),
            "MEGASNN_TEST_PID_FILE": str(self.pid_file),
            **(more or {}),
        }
        for rank, file in enumerate(self.files):
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            work = target or partial(_train, list(argv), fault)
            process = forking().Process(target=_rank, args=(file, own, work), daemon=True)
            process.start()
            self.processes.append(process)

    def close(self) -> None:
        super().close()
        self._port.close()


def _rank(file: Path, environment: dict[str, str], work: Callable[[], None]) -> None:
    _end_with_parent(signal.SIGKILL)
    os.environ.update(environment)
    _write_to(file)
    import torch

    torch.set_num_threads(1)
    work()


def _train(argv: list[str], fault: tuple[str, int] | None) -> None:
    from tests.faults import driver

    if fault is not None and fault[1] == int(os.environ["RANK"]):
        getattr(driver, fault[0])()
    sys.exit(driver.pretrain_spikformer.main(argv))


class Torchrun(Running):
    """The program under torchrun, which is forked from the same server; everything that they write goes to one file.

    The ranks are processes that torchrun starts, as always.

    Args:
        where: flags that say how it meets those of other hosts.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        program: str,
        *argv: str,
        restarts: int = 0,
        where: tuple[str, ...] = ("--standalone",),
    ) -> None:
        super().__init__(folder, 1)
        flags = [*where, "--nproc-per-node", str(size), "--max-restarts", str(restarts)]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "MEGASNN_TEST_PID_FILE": str(self.pid_file),
        }
        (file,) = self.files
        file.touch()
        words = [*flags, str(ROOT / program), *argv]
        self.processes = [forking().Process(target=_torchrun, args=(file, environment, words))]
        self.processes[0].start()


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


_running: list[Running] = []


def end_all() -> None:
    """Whatever a test has started and, since it failed, not waited for."""
    while _running:
        _running.pop().close()


def _end_with_parent(number: signal.Signals) -> None:
    """This process gets the signal when the one that started it ends, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


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


def refused(ended: Ended, *expected: str, place: str = "while ") -> None:
    """Requires that one rank wrote the message, which says all that is expected and where, and nobody a traceback."""
    assert ended.status == [1] * len(ended.output), ended.output
    lines = [line for rank, text in enumerate(ended.output) for line in lines_of(rank, text)]
    text = "".join(ended.output)
    assert len(lines) == 1 and "Traceback" not in text, ended.output
    assert all(part in text[text.index(lines[0]) :] for part in (*expected, place)), text
