"""Saves of a run: in the background with the values of their moment, one at a time, and a failed one is survived."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megasnn.checkpoint import save
from megasnn.checkpoint.folder import BEST, LATEST, list_checkpoints
from megasnn.checkpoint.format import Progress
from megasnn.checkpoint.load import load_global_tensors
from megasnn.checkpoint.writer import Writer
from megasnn.common.grid import Grid
from tests.checkpoint.fake_model import CONFIG, Rank, known
from tests.small_disk import fill, small_disk

BOTH = pytest.mark.parametrize("background", [False, True])


class Session:
    """A writer of a fake rank's tensors, and its lines."""

    def __init__(self, folder: Path, layout: Grid, background: bool = True, **options: object) -> None:
        self.rank, self.said = Rank(layout), list[str]()
        self.rank.fill()
        group, report = self.rank.group, self.said.append
        self.writer = Writer(folder, process_group=group, background=background, report=report, **options)

    def save(self, iteration: int, best: bool = False) -> None:
        self.writer.save(Progress(iteration, 10 * iteration, config=CONFIG), self.rank.state, best)

    def saved(self, iteration: int) -> bool:
        """Whether a save succeeds, once it has ended."""
        self.save(iteration)
        self.writer.finish()
        return not self.writer.failed

    def spoil(self) -> None:
        for entry in self.rank.everything():
            entry.tensor.detach().zero_()


def is_known(folder: Path, step: int) -> bool:
    tensors = load_global_tensors(folder, step, with_optimizer=True)
    return all(torch.equal(value.double(), known(name, tuple(value.shape))) for name, value in tensors.items())


@contextmanager
def held_writes() -> Iterator[threading.Event]:
    """No data file is written before the event is set."""
    go, write = threading.Event(), save.write_safetensors

    def waiting(*arguments: object) -> object:
        assert go.wait(30)
        return write(*arguments)

    with mock.patch.object(save, "write_safetensors", waiting):
        yield go
        go.set()


def save_while_training(folder: Path) -> tuple[list[str], int | None, bool]:
    session = Session(folder, Grid(tp=2))
    with held_writes() as go:
        session.save(1)
        session.spoil()  # training goes on
        dist.all_reduce(torch.zeros(1))  # and so do its collectives, while the other thread has its own
        assert session.writer.saved_iteration is None and session.writer.busy and not list_checkpoints(folder)
        dist.barrier()
        go.set()
        session.writer.finish()
    session.rank.fill()
    session.save(2)
    session.save(3)  # waits for the one before
    session.save(3)
    session.writer.finish()
    return session.said, session.writer.saved_iteration, session.writer.failed


def test_a_save_in_the_background_has_the_values_of_its_moment(ranks, tmp_path):
    (said, saved, failed), (silent, _, _) = ranks(2, save_while_training, tmp_path)
    assert (saved, failed, silent) == (3, False, [])
    assert [line.split(" in ")[0] for line in said if line.startswith("saved")] == [
        f"saved {tmp_path / f'iter_000000{step}'}" for step in (1, 2, 3)
    ]
    assert all(is_known(tmp_path, step) for step in (1, 2, 3))


@BOTH
def test_a_tensor_may_change_its_memory_between_saves(tmp_path, background):
    session = Session(tmp_path, Grid(), background)
    parameter = session.rank.parameters()[0]
    for step, order in enumerate((torch.contiguous_format, torch.channels_last, torch.channels_last), 1):
        before, parameter.data = parameter.data, parameter.data.clone(memory_format=order)
        before.zero_()
        assert session.saved(step) and is_known(tmp_path, step)


def fail_once(folder: Path, background: bool, fault: str) -> tuple[list[str], list[bool]]:
    """The first save meets a fault on one rank: a state that cannot be saved, or memory that runs out."""
    session, outcomes = Session(folder, Grid(tp=2), background), []
    state = next(iter(session.rank.optimizer.state.values()))
    for step in (1, 2):
        fails = step == 1 and dist.get_rank() == 1
        if fails and fault == "state":
            state["odd"] = torch.zeros(7)
        copy, error = torch._foreach_copy_, MemoryError("injected")
        with mock.patch.object(torch, "_foreach_copy_", mock.Mock(side_effect=error) if fails else copy):
            outcomes.append(session.saved(step))
        state.pop("odd", None)
    return session.said, outcomes


@pytest.mark.parametrize(
    ("background", "fault", "told"),
    [(False, "state", "optimizer.odd"), (True, "memory", "inject")],
)
def test_a_failure_on_one_rank_fails_the_save_on_all_and_no_run(ranks, tmp_path, background, fault, told):
    (said, outcomes), (_, other) = ranks(2, fail_once, tmp_path, background, fault)
    assert outcomes == other == [False, True]
    assert "iteration 1 " in said[0] and "NOT SAVED" in said[0] and told in said[0]
    assert list_checkpoints(tmp_path) == [2] and is_known(tmp_path, 2)


@BOTH
def test_the_best_is_named_and_old_ones_go(tmp_path, background):
    session = Session(tmp_path, Grid(), background, keep_last=1)
    assert session.saved(1)
    session.save(1, best=True)
    assert session.saved(2) and session.saved(3)
    assert list_checkpoints(tmp_path) == [1, 3] and (tmp_path / BEST).read_text() == "1\n"
    assert [line for line in session.said if "removed" in line and "iter_0000002" in line]


def save_until_full(folder: Path, background: bool, free: int) -> tuple[list[bool], list[str]]:
    session, outcomes = Session(folder, Grid(tp=2), background), []
    for step in (1, 2, 3):
        if dist.get_rank() == 0 and step == 2:
            fill(folder, free)
        elif dist.get_rank() == 0 and step == 3:
            (folder / "ballast").unlink()
        dist.barrier()
        outcomes.append(session.saved(step))
    return outcomes, session.said


@BOTH
def test_a_full_disk(ranks, tmp_path, background):
    with small_disk(tmp_path / "disk", "512k") as disk:
        (first, said), (second, _) = ranks(2, save_until_full, disk, background, 20_000)
        assert first == second == [True, False, True]
        assert [line for line in said if "iteration 2 " in line and "No space left on device" in line]
        assert list_checkpoints(disk) == [1, 3] and is_known(disk, 3)
        assert sorted(path.name for path in disk.iterdir()) == ["iter_0000001", "iter_0000003", LATEST]
