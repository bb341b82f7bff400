"""SIGKILL at any moment: the newest checkpoint loads, and the run resumed from it ends as if it had never been killed.

The moments are drawn anew for each seed; fifty of them, half with saves in the background:

    MEGASNN_KILLS=50 python -m pytest tests/faults/test_kills.py
"""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch

from megasnn.checkpoint import find_checkpoint, list_checkpoints, load_global_tensors, read_metadata, verify_checkpoint
from tests.faults.launch import PP2, Ranks
from tests.training.runs import TINY, train

MOMENTS = int(os.environ.get("MEGASNN_KILLS", "4"))
MORE = 12  # `pytest -m matrix`
SEED = os.environ.get("MEGASNN_KILLS_SEED", "0")
LAST = 8
RUN = (*PP2, "--eval-iters", "0", "--train-iters", str(LAST), "--save-interval", "1", "--log-interval", "1")


def at(folder: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    return load_global_tensors(folder, step, with_optimizer=True)


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def straight(ranks, tmp_path_factory) -> dict[int, dict[str, torch.Tensor]]:
    """What a run that is never killed has after each step, the optimizer's state included."""
    folder = tmp_path_factory.mktemp("straight")
    ranks(2, train, os.environ["MEGASNN_CACHE"], *RUN, "--save", str(folder))
    return {step: at(folder, step) for step in range(1, LAST + 1)}


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


@pytest.mark.parametrize(
    "moment", [*range(MOMENTS), *(pytest.param(each, marks=pytest.mark.matrix) for each in range(MOMENTS, MORE))]
)
def test_nothing_is_lost_and_nothing_is_wrong(ranks, straight, tmp_path, moment) -> None:
    draw = random.Random(f"{SEED} {moment}")
    folder = tmp_path / "run"
    flags = (*RUN, "--load", str(folder), "--save", str(folder), *(["--async-save"] if moment % 2 else []))
    kill(Ranks(tmp_path, 2, *TINY, *flags), draw)
    with warnings.catch_warnings():
        # That `latest` was not moved yet is told, and fine.
        warnings.filterwarnings("ignore", ".* was saved later", UserWarning)
        if saved := list_checkpoints(folder):
            newest = read_metadata(find_checkpoint(folder, None)).iteration
            assert same(at(folder), straight[newest]) and newest >= saved[-1] - 1
            assert {problem for _, problem in verify_checkpoint(find_checkpoint(folder, saved[-1]))} == {None}
        outcomes = ranks(2, train, os.environ["MEGASNN_CACHE"], *flags)
    assert {outcome.iteration for outcome in outcomes} == {LAST}
    assert same(at(folder, LAST), straight[LAST])
    assert not list(folder.glob("*.tmp"))
