"""The cache folder belongs to its user, and what lies in it is bounded."""

from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numba
import pytest

from megasnn.cache import CacheError, build_once, cache_folder
from megasnn.files import locks
from megasnn.kernels.jit import FolderLocator

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("MEGASNN_CACHE", str(folder))
    return folder


def make(cache: Path, name: str, size: int, lasting: bool = False) -> Path:
    return build_once(cache / "unpacked" / name, lambda path: path.write_bytes(bytes(size)) and None, lasting)


def found(cache: Path) -> set[str]:
    return {path.name for path in (cache / "unpacked").iterdir() if not path.name.startswith(".")}


def age(path: Path, seconds: float) -> None:
    os.utime(path, (path.stat().st_mtime - seconds,) * 2)


def test_the_folder_is_this_users_alone(cache, tmp_path, monkeypatch):
    assert cache_folder("index") == cache / "index"
    assert cache.stat().st_mode & 0o777 == 0o700
    for folder in (cache, cache / "index"):
        folder.chmod(0o1777)
        with pytest.raises(CacheError, match=f"other users can write to .*{folder.name} .mode 1777.*MEGASNN_CACHE"):
            cache_folder("index")
        assert folder.stat().st_mode & 0o7777 == 0o1777, "it is not ours to change: it may be /tmp"
        folder.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(CacheError, match="belongs to another user .*MEGASNN_CACHE"):
        cache_folder()


def test_inner_folders_are_this_users_too(cache, tmp_path, monkeypatch):
    inner = cache_folder("index")
    lstat = Path.stat

    def anothers(path, **options):
        state = list(lstat(path, **options))
        return os.stat_result(state[:4] + [state[4] + (path == inner)] + state[5:])

    monkeypatch.setattr(Path, "stat", anothers)
    with pytest.raises(CacheError, match="index belongs to another user .*MEGASNN_CACHE"):
        cache_folder("index")


@pytest.mark.parametrize("how", ["relative", "link"])
def test_what_is_in_use_stays_however_the_folder_is_named(cache, tmp_path, monkeypatch, how):
    monkeypatch.chdir(tmp_path)
    cache_folder("unpacked")
    Path("link").symlink_to(cache)
    monkeypatch.setenv("MEGASNN_CACHE", {"relative": "cache", "link": str(tmp_path / "link")}[how])
    monkeypatch.setenv("MEGASNN_CACHE_GB", "0.001")
    used = build_once(cache_folder("unpacked") / "used", lambda path: path.write_bytes(bytes(600_000)) and None)
    with pytest.raises(CacheError, match="what is in use cannot be removed"):
        make(cache, "more", 600_000)
    assert used.exists() and used == cache / "unpacked" / "used"


def test_what_is_in_use_stays_where_the_file_system_has_no_locks(cache, monkeypatch):
    def no_locks(descriptor, how):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(locks.fcntl, "flock", no_locks)
    monkeypatch.setenv("MEGASNN_CACHE_GB", "0.001")
    make(cache, "used", 600_000, lasting=True)
    with pytest.raises(CacheError, match="what is in use cannot be removed"):
        make(cache, "more", 600_000)
    assert found(cache) == {"used"}
    (own,) = (cache / "users").iterdir()
    ended = subprocess.Popen(["true"])
    ended.wait()
    own.rename(own.with_name(own.name.replace(f"-{os.getpid()}-", f"-{ended.pid}-")))
    make(cache, "more", 600_000)
    assert found(cache) == {"more"}, "what an ended process used is not in use"


def test_where_it_is(tmp_path, monkeypatch):
    monkeypatch.delenv("MEGASNN_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / "home/.cache/megasnn"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg/megasnn"


def test_the_least_recently_used_goes(cache, monkeypatch):
    monkeypatch.setenv("MEGASNN_CACHE_GB", "0.001")
    for index in range(3):
        age(make(cache, f"old{index}", 300_000), 1000 - index)
    make(cache, "old0", 300_000)  # used again
    make(cache, "new", 300_000)
    assert found(cache) == {"old0", "old2", "new"}


def _use(name: str, ready, end) -> None:
    make(Path(os.environ["MEGASNN_CACHE"]), name, 600_000, lasting=True)
    ready.set()
    end.wait(60)


def test_what_a_running_process_uses_stays(cache, monkeypatch):
    monkeypatch.setenv("MEGASNN_CACHE_GB", "0.001")
    context = multiprocessing.get_context("spawn")
    ready, end = context.Event(), context.Event()
    user = context.Process(target=_use, args=("used", ready, end), daemon=True)
    user.start()
    assert ready.wait(60)
    age(cache / "unpacked" / "used", 5000)
    make(cache, "other", 300_000)
    with pytest.raises(CacheError, match=r"would hold 0.0012 GB.*MEGASNN_CACHE_GB.*0.001"):
        make(cache, "more", 600_000)
    assert found(cache) == {"used"}
    end.set()
    user.join()
    make(cache, "more", 600_000)
    assert found(cache) == {"more"}


def test_remains_of_killed_processes_are_removed(cache):
    make(cache, "first", 10)
    for name in (".half.host.123", ".first.lock"):
        (cache / "unpacked" / name).write_bytes(b"half")
        age(cache / "unpacked" / name, 7200)
    (cache / "unpacked" / ".young.host.123").write_bytes(b"half")
    with locks.held(cache / "unpacked" / ".slow.lock", "unpacks for hours", 0):
        age(cache / "unpacked" / ".slow.lock", 7200)
        make(cache, "large", 80_000_000)
    left = {path.name for path in (cache / "unpacked").iterdir()}
    assert left == {"first", "large", ".young.host.123", ".large.lock", ".slow.lock"}


@pytest.mark.parametrize("limit", ["none", "0", "-3", "nan", "inf"])
def test_a_limit_that_makes_no_sense(cache, monkeypatch, limit):
    monkeypatch.setenv("MEGASNN_CACHE_GB", limit)
    with pytest.raises(CacheError, match=f"MEGASNN_CACHE_GB must be a number of gigabytes above 0, it is '{limit}'"):
        make(cache, "a", 10)
    assert found(cache) == set()


def test_machine_code_lies_in_the_cache_and_not_beside_the_source(cache):
    """numba runs what it finds in its cache."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("NUMBA_CACHE_DIR", None)
    code = (
        "from megasnn.kernels.jit import kernel; from megasnn.files.locks import held; import numba\n"
        "print(kernel(held.__wrapped__).stats.cache_path, repr(numba.config.CACHE_DIR))"
    )
    run = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert run.stdout.startswith(str(cache / "numba")) and run.stdout.endswith("''\n")
    assert (cache / "numba").stat().st_mode & 0o777 == 0o700


def test_machine_code_is_out_of_date_when_a_file_beside_it_changes(tmp_path: Path) -> None:
    """A kernel calls parts that stand in other files of its folder."""
    for name in ("kernel", "part"):
        (tmp_path / f"{name}.py").write_text(f"name = {name!r}\n")

    def stamp() -> str:
        locator = FolderLocator.from_function(stamp, str(tmp_path / "kernel.py"))
        return locator.get_source_stamp()

    with mock.patch.object(numba.config, "CACHE_DIR", str(tmp_path / "cache")):
        before = stamp()
        assert stamp() == before
        (tmp_path / "part.py").write_text("name = 'other'\n")
        assert stamp() != before
