"""Saves of a run: in the background with the values of their moment, one at a time, and a failed one is survived."""

from __future__ import annotations

import os
import resource
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megasnn.checkpoint import LocalState, Progress, Retention, Saver, list_checkpoints, load_global_tensors, saver
from megasnn.checkpoint.folder import BEST, LATEST
from tests.checkpoint.fake_model import CONFIG, Layout, Rank, known

BOTH = pytest.mark.parametrize("background", [False, True])


class Session:
    """A saver of a fake rank's tensors, and what it said."""

    def __init__(self, folder: Path, layout: Layout, background: bool, retention: Retention | None = None) -> None:
        self.rank, self.said = Rank(layout), list[str]()
        self.rank.fill()
        self.saver = Saver(
            folder, process_group=self.rank.group, background=background, retention=retention, report=self.said.append
        )

    def save(self, iteration: int, best: bool = False) -> None:
        self.saver.save(Progress(iteration, 10 * iteration, config=CONFIG), self.rank.state, best)

    def saved(self, iteration: int) -> bool:
        """Whether a save succeeds, once it has ended."""
        self.save(iteration)
        self.saver.finish()
        return not self.saver.failed

    def spoil(self) -> None:
        self.saver.settle()
        for entry in self.rank.everything():
            entry.tensor.detach().zero_()


def is_known(folder: Path, step: int) -> bool:
    tensors = load_global_tensors(folder, step, with_optimizer=True)
    return all(torch.equal(value.double(), known(name, tuple(value.shape))) for name, value in tensors.items())


@contextmanager
def held_writes() -> Iterator[threading.Event]:
    """No data file is written before the event is set."""
    go, write = threading.Event(), saver.write_image

    def waiting(*arguments: object) -> object:
        assert go.wait(30)
        return write(*arguments)

    with mock.patch.object(saver, "write_image", waiting):
        yield go
        go.set()


def save_while_training(folder: Path) -> tuple[list[str], int | None, bool]:
    session = Session(folder, Layout(tensor=2), background=True)
    with held_writes() as go:
        session.save(1)
        session.spoil()  # training goes on
        dist.all_reduce(torch.zeros(1))  # and so do its collectives, while the other thread has its own
        assert session.saver.saved is None and not list_checkpoints(folder)
        dist.barrier()
        go.set()
        session.saver.finish()
    session.rank.fill()
    session.save(2)
    session.save(3)  # waits for the one before
    session.save(3)
    session.saver.finish()
    return session.said, session.saver.saved, session.saver.failed


def test_a_save_in_the_background_has_the_values_of_its_moment(ranks, tmp_path):
    (said, saved, failed), (silent, _, _) = ranks(2, save_while_training, tmp_path)
    assert (saved, failed, silent) == (3, False, [])
    assert [line.split(" in ")[0] for line in said if line.startswith("saved")] == [
        f"saved {tmp_path / f'iter_000000{step}'}" for step in (1, 2, 3)
    ]
    assert all(is_known(tmp_path, step) for step in (1, 2, 3))


def test_an_update_waits_for_the_copies_and_statistics_are_copied_before_the_save_returns(tmp_path, monkeypatch):
    rest = saver.StagingBuffer.rest
    monkeypatch.setattr(saver.StagingBuffer, "rest", lambda self: (time.sleep(0.3), rest(self)))
    session = Session(tmp_path, Layout(), background=True)
    began = time.monotonic()
    session.save(1)
    assert time.monotonic() - began < 0.2, "the weights are copied later"
    for entry in session.rank.tensors:
        if entry.is_parameter:
            entry.tensor.grad = torch.ones_like(entry.tensor)
        else:
            entry.tensor.zero_()
    session.rank.optimizer.step()
    assert time.monotonic() - began > 0.3
    session.saver.finish()
    assert is_known(tmp_path, 1)


def fail_once(folder: Path, background: bool, fault: str) -> tuple[list[str], list[bool]]:
    """The first save meets a fault on one rank: a state that cannot be saved, or memory that runs out."""
    session = Session(folder, Layout(tensor=2), background)
    state = next(iter(session.rank.optimizer.state.values()))
    copy, outcomes = saver._copy, []
    for step in (1, 2):
        fails = step == 1 and dist.get_rank() == 1
        if fails and fault == "state":
            state["odd"] = torch.zeros(7)
        error = MemoryError("injected") if fails and fault == "memory" else None
        with mock.patch.object(saver, "_copy", mock.Mock(side_effect=error) if error else copy):
            outcomes.append(session.saved(step))
        state.pop("odd", None)
    return session.said, outcomes


@pytest.mark.parametrize(
    ("background", "fault", "told"),
    [(False, "state", "optimizer.odd"), (True, "state", "optimizer.odd"), (True, "memory", "MemoryError: injected")],
)
def test_what_fails_on_one_rank_fails_the_save_on_all_and_no_run(ranks, tmp_path, background, fault, told):
    (said, outcomes), (_, other) = ranks(2, fail_once, tmp_path, background, fault)
    assert outcomes == other == [False, True]
    assert "iteration 1 " in said[0] and "NOT SAVED" in said[0] and told in said[0]
    assert list_checkpoints(tmp_path) == [2] and is_known(tmp_path, 2)


def test_a_second_save_waits_for_the_first_and_says_so(tmp_path):
    session = Session(tmp_path, Layout(), background=True)
    with held_writes() as go:
        session.save(1)
        threading.Timer(0.2, go.set).start()
        session.save(2)
    session.saver.finish()
    assert "waiting" in session.said[0]
    assert list_checkpoints(tmp_path) == [1, 2] and is_known(tmp_path, 1) and is_known(tmp_path, 2)


@BOTH
def test_a_failed_save_is_told_and_tried_again(tmp_path, background):
    session = Session(tmp_path, Layout(), background)
    assert session.saved(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        assert not session.saved(2) and session.saver.saved == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "iteration 2 " in session.said[-1] and "OSError: [Errno 27] File too large" in session.said[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", LATEST]
    assert session.saved(2) and session.saver.saved == 2 and is_known(tmp_path, 2)


@BOTH
def test_the_best_is_named_and_old_ones_go(tmp_path, background):
    session = Session(tmp_path, Layout(), background, Retention(last=1))
    assert session.saved(1)
    session.save(1, best=True)
    assert session.saved(2) and session.saved(3)
    assert list_checkpoints(tmp_path) == [1, 3] and (tmp_path / BEST).read_text() == "1\n"
    assert [line for line in session.said if "removed" in line and "iter_0000002" in line]


def test_tensors_of_other_shapes_are_staged_anew(tmp_path):
    session = Session(tmp_path, Layout(), background=True)
    assert session.saved(1)
    session.saver.save(Progress(2), LocalState(session.rank.tensors[1:]))
    session.saver.finish()
    names = {entry.name for entry in session.rank.tensors[1:]}
    assert load_global_tensors(tmp_path, 2, with_optimizer=True).keys() == names and is_known(tmp_path, 2)


def save_until_full(folder: Path, background: bool) -> tuple[list[bool], list[str]]:
    session, outcomes = Session(folder, Layout(tensor=2), background), []
    for step in (1, 2, 3):
        if step == 3 and dist.get_rank() == 0:
            (folder / "ballast").unlink()
        dist.barrier()
        outcomes.append(session.saved(step))
    return outcomes, session.said


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """512 KiB; needs the right to mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount a small tmpfs here; a full disk is played by an injected ENOSPC elsewhere")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@BOTH
def test_a_full_disk(ranks, small_disk, background):
    assert Session(small_disk.parent / "elsewhere", Layout(), background=False).saved(1)
    need = sum(file.stat().st_size for file in (small_disk.parent / "elsewhere" / "iter_0000001").iterdir())
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    (small_disk / "ballast").write_bytes(b"x" * (free - int(2.5 * need)))
    (first, said), (second, _) = ranks(2, save_until_full, small_disk, background)
    assert first == second == [True, False, True]
    assert [line for line in said if "iteration 2 " in line and "No space left on device" in line]
    assert list_checkpoints(small_disk) == [1, 3] and is_known(small_disk, 3)


def test_a_disk_that_becomes_read_only(small_disk):
    session = Session(small_disk, Layout(), background=True)
    assert session.saved(1)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert not session.saved(2) and "Read-only file system" in session.said[-1]
    assert list_checkpoints(small_disk) == [1] and is_known(small_disk, 1)
