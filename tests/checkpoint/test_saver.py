"""Saves of a run: in the background with the values of their moment, one at a time, and a failed one is survived."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megasnn.checkpoint import (
    Progress,
    Retention,
    Saver,
    list_checkpoints,
    load_global_tensors,
    save_global_tensors,
    snapshot,
    verify_checkpoint,
    writer_process,
)
from megasnn.checkpoint.aside import Aside
from megasnn.checkpoint.folder import LATEST, reading
from megasnn.checkpoint.snapshot import _copy as copy
from megasnn.checkpoint.writer_process import WriterProcess
from megasnn.sharded_tensors import ShardedTensor
from tests.checkpoint.fake_model import CONFIG, Layout, Rank, known


def progress(iteration: int) -> Progress:
    return Progress(iteration, 10 * iteration, {}, CONFIG, None)


class Session:
    """A saver of a fake rank's tensors, and what it said."""

    def __init__(self, folder: Path, layout: Layout, background: bool, retention: Retention | None = None) -> None:
        self.rank, self.said = Rank(layout), list[str]()
        self.rank.fill()
        self.saver = Saver(
            folder,
            process_group=self.rank.group,
            background=background,
            retention=retention,
            report=self.said.append,
        )
        self.saver.prepare(self.rank.tensors, self.rank.optimizer)

    @property
    def writer(self) -> WriterProcess:
        return self.saver._aside._snapshot.image.writer

    def save(self, iteration: int) -> None:
        self.saver.save(progress(iteration), self.rank.tensors, self.rank.optimizer)

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
    go, write = threading.Event(), Aside.write

    def waiting(self, *arguments):
        assert go.wait(30)
        return write(self, *arguments)

    Aside.write = waiting
    try:
        yield go
    finally:
        go.set()
        Aside.write = write


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


def slow_copy(pair: tuple[ShardedTensor, torch.Tensor]) -> None:
    time.sleep(0.01)
    copy(pair)


def test_an_update_waits_for_the_copies_and_statistics_are_copied_before_the_save_returns(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "_copy", slow_copy)
    session = Session(tmp_path, Layout(), background=True)
    parameters = [entry.tensor for entry in session.rank.tensors if entry.is_parameter]
    session.save(1)
    assert session.saver._aside._snapshot._left, "the weights are copied later"
    for entry in session.rank.tensors:
        if not entry.is_parameter:
            entry.tensor.zero_()
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    session.rank.optimizer.step()
    session.saver.finish()
    assert is_known(tmp_path, 1)


def fail_to_copy_once(folder: Path) -> tuple[list[str], list[bool]]:
    session, outcomes = Session(folder, Layout(tensor=2), background=True), []
    for step in (1, 2):
        fails = step == 1 and dist.get_rank() == 1
        with mock.patch.object(snapshot, "_copy", side_effect=MemoryError("injected") if fails else copy):
            session.save(step)
            session.spoil()
            session.saver.finish()
        session.rank.fill()
        outcomes.append(session.saver.failed)
    return session.said, outcomes


def test_a_copy_that_fails_on_one_rank_fails_the_save_on_all(ranks, tmp_path):
    (said, outcomes), (_, other) = ranks(2, fail_to_copy_once, tmp_path)
    assert outcomes == other == [True, False]
    assert "iteration 1 was NOT SAVED" in said[0] and "MemoryError: injected" in said[0]
    assert list_checkpoints(tmp_path) == [2] and is_known(tmp_path, 2)


def fail_to_describe_once(folder: Path, background: bool) -> tuple[list[str], list[bool]]:
    """One rank's optimizer has a state that no tensor of the checkpoint can be."""
    session, outcomes = Session(folder, Layout(tensor=2), background), []
    state = next(iter(session.rank.optimizer.state.values()))
    for step in (1, 2):
        if step == 1 and dist.get_rank() == 1:
            state["odd"] = torch.zeros(7)
        session.save(step)
        session.saver.finish()
        state.pop("odd", None)
        outcomes.append(session.saver.failed)
    return session.said, outcomes


@pytest.mark.parametrize("background", [False, True])
def test_a_state_that_cannot_be_saved_fails_the_save_on_all_ranks_and_no_run(ranks, tmp_path, background):
    (said, outcomes), (_, other) = ranks(2, fail_to_describe_once, tmp_path, background)
    assert outcomes == other == [True, False]
    assert "iteration 1 was NOT SAVED" in said[0] and re.search(r"optimizer\.odd\..*, found \[7\]", said[0])
    assert list_checkpoints(tmp_path) == [2] and is_known(tmp_path, 2)


def test_a_second_save_waits_for_the_first_and_says_so(tmp_path):
    session = Session(tmp_path, Layout(), background=True)
    with held_writes() as go:
        session.save(1)
        threading.Timer(0.2, go.set).start()
        session.save(2)
    session.saver.finish()
    assert session.said[0] == "the checkpoint of iteration 1 is still being written: waiting for it"
    assert list_checkpoints(tmp_path) == [1, 2] and is_known(tmp_path, 1) and is_known(tmp_path, 2)


@pytest.mark.parametrize("background", [False, True])
def test_a_failed_save_is_told_and_tried_again(tmp_path, background):
    session = Session(tmp_path, Layout(), background)
    session.save(1)
    session.saver.finish()
    with short_files(session.writer.pid if background else os.getpid()):
        session.save(2)
        session.saver.finish()
        assert session.saver.failed and session.saver.saved == 1
    assert "iteration 2 was NOT SAVED" in session.said[-1] and "OSError: [Errno 27] File too large" in session.said[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", LATEST]
    session.save(2)
    session.saver.finish()
    assert not session.saver.failed and session.saver.saved == 2 and is_known(tmp_path, 2)


@contextmanager
def short_files(process: int) -> Iterator[None]:
    """A process cannot write files of more than a kilobyte."""
    limits = resource.prlimit(process, resource.RLIMIT_FSIZE)
    resource.prlimit(process, resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(process, resource.RLIMIT_FSIZE, limits)


def test_a_writer_that_is_killed_fails_the_save_that_it_writes_and_no_other(tmp_path):
    session = Session(tmp_path, Layout(), background=True)
    session.save(1)
    session.saver.finish()
    os.kill(session.writer.pid, signal.SIGSTOP)
    session.save(2)
    os.kill(session.writer.pid, signal.SIGKILL)
    session.saver.finish()
    assert session.saver.failed and "iteration 2 was NOT SAVED" in session.said[-1]
    assert "rank 0: ChildProcessError" in session.said[-1] and "ended with status -9" in session.said[-1]
    session.save(3)
    session.saver.finish()
    assert not session.saver.failed
    killed = session.writer
    os.kill(killed.pid, signal.SIGKILL)
    while killed.alive:
        time.sleep(0.001)
    session.save(4)
    session.saver.finish()
    assert session.saver.saved == 4 and list_checkpoints(tmp_path) == [1, 3, 4] and is_known(tmp_path, 4)


def test_a_writer_that_cannot_be_started_fails_the_save_only(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(writer_process, "start_program", mock.Mock(side_effect=BlockingIOError("injected")))
        session = Session(tmp_path, Layout(), background=True)
        session.save(1)
        session.saver.finish()
    assert session.saver.failed and "iteration 1 was NOT SAVED" in session.said[0]
    assert "BlockingIOError: injected" in session.said[0]
    session.save(2)
    session.saver.finish()
    assert not session.saver.failed and is_known(tmp_path, 2)


def test_the_writer_needs_no_torch_and_is_one_process_for_all_saves(tmp_path):
    session = Session(tmp_path, Layout(), background=True)
    first = session.writer.pid
    for step in (1, 2):
        session.save(step)
        session.saver.finish()
    assert session.writer.pid == first
    assert session.writer.call(eval, "'torch' in __import__('sys').modules") is False
    assert session.writer.call(os.getpriority, os.PRIO_PROCESS, 0) == 19
    session.saver.close()
    assert not session.writer.alive


def test_tensors_of_other_shapes_are_laid_out_anew(tmp_path):
    session = Session(tmp_path, Layout(), background=True)
    session.save(1)
    session.saver.finish()
    session.saver.save(progress(2), session.rank.tensors[1:], None)
    session.saver.finish()
    assert not session.saver.failed
    names = {entry.name for entry in session.rank.tensors[1:]}
    assert load_global_tensors(tmp_path, 2, with_optimizer=True).keys() == names and is_known(tmp_path, 2)


OWNER = """
import time
from megasnn.checkpoint.writer_process import WriterProcess
writer = WriterProcess(1)
print(writer.pid, flush=True)
writer.call(time.sleep, 600)
"""


def test_a_writer_ends_with_its_rank(tmp_path):
    """In the midst of its work, and without the rank's doing anything."""
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as owner:
        writer = Path(f"/proc/{int(owner.stdout.readline())}")
        while "megasnn.checkpoint.writer" not in (writer / "cmdline").read_text():
            time.sleep(0.01)
        owner.kill()
    deadline = time.monotonic() + 10
    while writer.exists() and "Z" not in (writer / "stat").read_text().split(")")[1]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def save_until_full(folder: Path, background: bool) -> tuple[list[bool], list[str]]:
    session = Session(folder, Layout(tensor=2), background)
    outcomes = []
    for step in (1, 2, 3):
        if step == 3 and dist.get_rank() == 0:
            (folder / "ballast").unlink()
        dist.barrier()
        session.save(step)
        session.saver.finish()
        outcomes.append(session.saver.failed)
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


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk(ranks, small_disk, background):
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    need = sum(file.stat().st_size for file in one_checkpoint(small_disk).iterdir())
    (small_disk / "ballast").write_bytes(b"x" * (free - int(2.5 * need)))
    (first, said), (second, _) = ranks(2, save_until_full, small_disk, background)
    assert first == second == [False, True, False]
    assert [line for line in said if "iteration 2 was NOT SAVED" in line and "No space left on device" in line]
    assert list_checkpoints(small_disk) == [1, 3] and is_known(small_disk, 3)


def one_checkpoint(folder: Path) -> Path:
    """To see how large it is."""
    session = Session(folder.parent / "elsewhere", Layout(), background=False)
    session.save(1)
    return folder.parent / "elsewhere" / "iter_0000001"


def test_a_disk_that_becomes_read_only(small_disk):
    session = Session(small_disk, Layout(), background=True)
    session.save(1)
    session.saver.finish()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    session.save(2)
    session.saver.finish()
    assert session.saver.failed and "Read-only file system" in session.said[-1]
    assert list_checkpoints(small_disk) == [1] and is_known(small_disk, 1)


def many(folder: Path, steps: Iterator[int], **retention: int) -> list[int]:
    session = Session(folder, Layout(), background=False, retention=Retention(**retention))
    for step in steps:
        session.save(step)
    return list_checkpoints(folder)


def test_so_many_are_kept(tmp_path):
    assert many(tmp_path / "a", iter(range(1, 8)), last=2) == [6, 7]
    assert many(tmp_path / "b", iter(range(1, 8)), last=2, every=3) == [3, 6, 7]
    assert many(tmp_path / "c", iter([10, 20, 30, 5, 6]), last=2) == [5, 6]  # went back: what was saved last counts
    assert not [path for path in tmp_path.glob("*/*") if path.name.endswith(".tmp")]


def test_those_of_another_run_stay(tmp_path):
    assert many(tmp_path, iter([100, 200])) == [100, 200]
    assert many(tmp_path, iter([1, 2, 3]), last=1, others=2) == [3, 100, 200]


def test_what_is_being_read_is_not_removed(tmp_path):
    session = Session(tmp_path, Layout(), background=False, retention=Retention(last=1))
    session.save(1)
    with reading(tmp_path / "iter_0000001"):
        session.save(2)
        assert list_checkpoints(tmp_path) == [1, 2]
    session.save(3)
    assert list_checkpoints(tmp_path) == [3]


def test_a_damaged_one_does_not_count(tmp_path):
    for step in (1, 2, 3):
        save_global_tensors(tmp_path, {"w": torch.ones(3)}, iteration=step)
    (tmp_path / "iter_0000003" / "__0_0.distcp").write_bytes(b"")
    assert many(tmp_path, iter([4]), last=2) == [2, 3, 4]


def test_a_run_killed_while_it_replaced_a_checkpoint_leaves_the_old_one(tmp_path):
    save_global_tensors(tmp_path, {"w": torch.ones(3)}, iteration=7)
    (tmp_path / "iter_0000007").rename(tmp_path / "iter_0000007.replaced.tmp")
    assert list_checkpoints(tmp_path) == [7] and load_global_tensors(tmp_path)["w"].sum() == 3
    save_global_tensors(tmp_path, {"w": torch.zeros(3)}, iteration=7)
    assert load_global_tensors(tmp_path)["w"].sum() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000007", LATEST]
    assert all(problem is None for _, problem in verify_checkpoint(tmp_path / "iter_0000007"))
