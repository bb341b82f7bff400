"""Locks: no link is followed, no pipe waited for, and whoever waits in vain learns for whom."""

from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megasnn.cache import build_once
from megasnn.files import locks
from megasnn.files.locks import LockError, held
from megasnn.kernels import runtime

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("MEGASNN_CACHE", str(folder))
    return folder


def compile_once() -> None:
    """What every start with the fused kernels does."""

    def kernel(array, first, last):
        pass

    runtime.run(kernel, 1, np.zeros(1))


class Kernel:
    """A kernel as numba makes it: `stats` names the folder of its machine code."""

    def __init__(self, cache_path: Path | None, *failures: OSError) -> None:
        self.stats = SimpleNamespace(cache_path=cache_path)
        self.calls, self._failures = 0, list(failures)

    def __call__(self, array, first, last) -> None:
        self.calls += 1
        if self._failures:
            raise self._failures.pop()


@pytest.mark.parametrize("failure", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_kernels_run_where_the_cache_cannot_be_written(cache, monkeypatch, failure):
    """Neither the lock nor the machine code can be stored there."""

    def refuse(*args):
        raise OSError(failure, os.strerror(failure))

    monkeypatch.setattr(locks, "open_lock", refuse)
    kernel = Kernel(cache / "numba", OSError(failure, "the machine code is not stored"))
    runtime.run(kernel, 1, np.zeros(1))
    assert kernel.calls == 2


def test_ranks_that_store_no_machine_code_do_not_wait_for_each_other(cache, monkeypatch):
    monkeypatch.setattr(runtime, "held", lambda *args: pytest.fail("it takes the lock"))
    runtime.run(Kernel(None), 1, np.zeros(1))


def make_a_file() -> None:
    build_once(Path(os.environ["MEGASNN_CACHE"], "thing"), _write)


def _write(path: Path) -> None:
    path.write_text("a")


USES = {
    "compile": (".compile.lock", compile_once),
    "cache": (".lock", make_a_file),
    "file": (".thing.lock", make_a_file),
}


@pytest.mark.parametrize("use", USES)
def test_a_link_is_not_followed(cache, tmp_path, use):
    name, action = USES[use]
    target = tmp_path / "precious"
    target.write_text("do not truncate")
    (cache / name).symlink_to(target)
    with pytest.raises(LockError, match=f"{name} is no plain file.*remove it"):
        action()
    assert target.read_text() == "do not truncate"


@pytest.mark.parametrize("use", USES)
def test_a_pipe_is_not_waited_for(cache, use):
    name, action = USES[use]
    os.mkfifo(cache / name)
    with pytest.raises(LockError, match=f"{name} is no plain file"):
        action()


def test_nothing_is_opened_in_the_shared_temporary_folder(tmp_path):
    """The old place of the compile lock: a link there had its target truncated."""
    shared = tmp_path / "tmp"
    shared.mkdir()
    target = tmp_path / "precious"
    target.write_text("do not truncate")
    (shared / f"megasnn-compile-{os.getuid()}.lock").symlink_to(target)
    code = "from tests.cache.test_locks import compile_once; compile_once()"
    environment = os.environ | {"TMPDIR": str(shared), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    assert target.read_text() == "do not truncate"


def _hold(path: Path, ready) -> None:
    with held(path, "sleeps", 0):
        ready.set()
        time.sleep(60)


@pytest.fixture
def holder(tmp_path):
    """A process that holds a lock."""
    started = []

    def start(path: Path) -> int:
        context = multiprocessing.get_context("spawn")
        ready = context.Event()
        process = context.Process(target=_hold, args=(path, ready), daemon=True)
        process.start()
        started.append(process)
        assert ready.wait(60)
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.join()


@pytest.mark.parametrize("use", USES)
def test_after_the_limit_the_holder_is_named(cache, monkeypatch, holder, use):
    name, action = USES[use]
    process = holder(cache / name)
    monkeypatch.setenv("MEGASNN_LOCK_TIMEOUT", "0.3")
    begun = time.monotonic()
    with pytest.raises(LockError, match=rf"process {process} on .*since .*sleeps.* holds .*{name}; after 0.3 s"):
        action()
    assert 0.3 <= time.monotonic() - begun < 10
    os.kill(process, 9)
    monkeypatch.setenv("MEGASNN_LOCK_TIMEOUT", "30")
    action()  # the lock went with its holder


def test_a_limit_that_is_no_number(cache, monkeypatch):
    monkeypatch.setenv("MEGASNN_LOCK_TIMEOUT", "soon")
    with pytest.raises(LockError, match="MEGASNN_LOCK_TIMEOUT must be a number of seconds, it is 'soon'"):
        compile_once()
