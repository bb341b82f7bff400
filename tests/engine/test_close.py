"""What an Engine and a run leave behind: no thread of Gloo's, which would end the program with an error at its end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from megasnn import Engine
from megasnn.parallel_state import TASKS
from tests.engine.test_engine import MODEL, PP2, SIZES
from tests.faults.launch import held_port
from tests.training.runs import train

pytestmark = pytest.mark.skipif(not TASKS.is_dir(), reason="this system does not list the threads of a process")


def threads() -> int:
    """How many of Gloo's threads this process has."""
    names = list[str]()
    for task in TASKS.iterdir():
        with suppress(OSError):  # it has ended meanwhile
            names.append((task / "comm").read_text())
    return sum("gloo" in name for name in names)


def threads_left(inside: int) -> int:
    """The same behind something that had so many inside; those that have ended are listed for a moment."""
    deadline = time.monotonic() + 5
    while threads() >= inside and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    return threads()


def of_engines() -> list[tuple[int, int]]:
    """In each of two Engines, one after the other, and behind it, where it is still there."""
    found, made, sizes = [], [], {**SIZES, "global_batch_size": 16}
    for _ in range(2):
        # Its gathers, its sums and its messages have groups of their own.
        with Engine(MODEL, **sizes, **PP2, weight_parallel_size=2, deterministic=True) as engine:
            engine.train_step(torch.rand(16, 1, 8, 8), torch.arange(16) % 10)
            engine.state_dict()
            inside = threads()
        found.append((inside, threads_left(inside)))
        made.append(engine)
        with pytest.raises(RuntimeError, match="the grid of ranks is gone"):
            assert engine.state.world.handle
    return found


def of_runs(cache: str, folder: str) -> list[int]:
    """Behind each of two runs, whose saves in the background have a group, too."""
    found = []
    for steps in ("1", "2"):
        flags = ("--train-iters", steps, "--save", folder, "--async-save", "--tensor-model-parallel-size", "2")
        train(cache, *flags)
        time.sleep(0.1)
        found.append(threads())
    return found


def test_no_thread_is_left(ranks, tmp_path: Path) -> None:
    """But those of the world, which somebody else has made."""
    for (inside, behind), again in ranks(4, of_engines):
        assert again == (inside, behind) and 0 < behind < inside
    for first, second in ranks(2, of_runs, str(tmp_path / "cache"), str(tmp_path / "run")):
        assert 0 < first == second


OF_NOBODY = """
import atexit
from tests.engine.test_close import threads_left

atexit.register(lambda: print("threads:", threads_left(1), flush=True))  # called last

import torch
from megasnn import Engine
from tests.engine.test_engine import MODEL, PP2, SIZES
from tests.faults.launch import held_port

engine = Engine(MODEL, **SIZES, **PP2)
engine.train_step(torch.rand(8, 1, 8, 8), torch.arange(8) % 10)
"""


def test_the_end_of_a_program_that_closes_no_engine() -> None:
    port = held_port()
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.getsockname()[1])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", OF_NOBODY],
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        output, _ = rank.communicate(timeout=100)
        assert rank.returncode == 0 and output.endswith("threads: 0\n"), output
    port.close()
