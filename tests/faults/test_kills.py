"""SIGKILL at any moment: the newest checkpoint loads, and the run resumed from it ends as if it had never been killed.

The moments are drawn anew for each seed; fifty of them, half with saves in the background:

    MEGASNN_KILLS=50 python -m pytest tests/faults/test_kills.py
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from functools import cache

import pytest
import torch

from megasnn.checkpoint.folder import checkpoints_to_try, list_checkpoints
from megasnn.checkpoint.format import read_metadata
from megasnn.checkpoint.tensor_io import damaged_files
from tests.faults.launch import PP2, Ranks
from tests.training.runs import TINY, same, saved, train

MOMENTS = int(os.environ.get("MEGASNN_KILLS", "2"))
SEED = os.environ.get("MEGASNN_KILLS_SEED", "0")
LAST = 4
RUN = ("--eval-iters", "0", "--train-iters", str(LAST), "--save-interval", "1", "--log-interval", "1")


LAYOUTS = {  # of two ranks
    "stages": PP2,
    "owned-rows": ("--use-distributed-optimizer",),
    "shared-weights": ("--weight-parallel-size", "2", "--micro-batch-size", "2", "--global-batch-size", "8"),
    "recompute": (*PP2, "--recompute", "always"),
    "shared-samples": ("--context-parallel-size", "2"),
    "shared-rows": ("--context-parallel-size", "2", "--context-parallel-cut", "rows"),
}


@pytest.fixture(scope="module")
def straight(ranks, tmp_path_factory) -> Callable[[str], dict[int, dict[str, torch.Tensor]]]:
    """By layout, what a run that is never killed has after each step, the optimizer's state included."""

    @cache
    def run(layout: str) -> dict[int, dict[str, torch.Tensor]]:
        folder = tmp_path_factory.mktemp("straight")
        ranks(2, train, os.environ["MEGASNN_CACHE"], *RUN, *LAYOUTS[layout], "--save", str(folder))
        return {step: saved(folder, step) for step in range(1, LAST + 1)}

    return run


def kill(running: Ranks, draw: random.Random) -> None:
    """Sometime after some step has been logged; all ranks, or one, after which the other has to end by itself."""
    step = draw.randint(1, LAST - 2)
    deadline = time.monotonic() + 60
    while f"iteration {step}/" not in (output := running.output()):
        assert time.monotonic() < deadline, output
        time.sleep(0.005)
    time.sleep(draw.uniform(0.0, 0.3))
    victims = draw.choice([running.processes, [draw.choice(running.processes)]])
    running.started = time.monotonic()
    for process in victims:
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
    ended = running.end(15)
    assert any(ended.status) or list_checkpoints(running.folder / "run")[-1] == LAST


def turns() -> list[tuple[str, int]]:
    """One layout for each moment, in turn. Every second moment saves in the background.

    The turn moves on by one, so that each layout does both.
    """
    names = list(LAYOUTS)
    return [(names[(moment + moment // len(names)) % len(names)], moment) for moment in range(MOMENTS)]


@pytest.mark.parametrize(("layout", "moment"), turns())
def test_nothing_is_lost_and_nothing_is_wrong(ranks, straight, tmp_path, layout, moment) -> None:
    draw = random.Random(f"{SEED} {moment}")
    folder, expected = tmp_path / "run", straight(layout)
    flags = (
        *RUN,
        *LAYOUTS[layout],
        "--load",
        str(folder),
        "--save",
        str(folder),
        *(["--async-save"] if moment % 2 else []),
    )
    kill(Ranks(tmp_path, 2, *TINY, *flags), draw)
    if kept := list_checkpoints(folder):
        newest = read_metadata(checkpoints_to_try(folder, None)[0]).iteration
        assert same(saved(folder), expected[newest]) and newest >= kept[-1] - 1
        path = folder / f"iter_{kept[-1]:07d}"
        assert damaged_files(path, read_metadata(path)) == []
    outcomes = ranks(2, train, os.environ["MEGASNN_CACHE"], *flags)
    assert {outcome.iteration for outcome in outcomes} == {LAST}
    assert same(saved(folder, LAST), expected[LAST])
    assert not list(folder.glob("*.tmp"))
