"""Worker processes: gone with the iterator and with the rank, named when they are lost, stopped or without memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from megasnn.data.dataset import ShardDataset
from megasnn.data.images import ImageFormat
from megasnn.data.shards import open_shard
from tests.data.shard_files import CLASSES, loader, write_shards

ONE_BY_ONE = {"global_batch_size": 1, "micro_batch_size": 1}
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Faulty(ImageFormat):
    """A decoder with a bug."""

    def decode(self, data: bytes) -> np.ndarray:
        raise KeyError("a bug")


def opened(tmp_path: Path, format: type[ImageFormat] = ImageFormat, size: int = 8) -> ShardDataset:
    return ShardDataset([open_shard(path) for path in write_shards(tmp_path, 23, 9)], format(size, 1), CLASSES)


def begun(tmp_path: Path, **options):
    """A loader with workers that has given a batch, and their process ids."""
    before = multiprocessing.active_children()
    batches = loader(opened(tmp_path), **options).batches()
    next(batches)
    return batches, [each.pid for each in multiprocessing.active_children() if each not in before]


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_end(processes: list[int], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_alive, processes))


def test_they_end_with_the_iterator_at_once(tmp_path):
    batches, workers = begun(tmp_path, num_workers=3)
    assert len(workers) == 3
    began = time.monotonic()
    batches.close()
    assert all_end(workers) and time.monotonic() - began < 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_lost_worker_is_named(tmp_path, number):
    batches, workers = begun(tmp_path, num_workers=2, **ONE_BY_ONE)
    os.kill(workers[0], number)
    with pytest.raises(ChildProcessError, match=f"{workers[0]} was killed by {number.name}"):
        for _ in range(50):
            next(batches)
    assert all_end(workers)


def test_a_stopped_worker_is_spoken_of_and_ends_the_run(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("megasnn.data.workers._SAID_SECONDS", 2.0)
    batches, workers = begun(tmp_path, num_workers=2, timeout=5.0, **ONE_BY_ONE)
    os.kill(workers[1], signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(ChildProcessError) as caught:
        for _ in range(50):
            next(batches)
    assert all(part in str(caught.value) for part in (f"{workers[1]} (stopped)", "--fetch-timeout"))
    assert f"{workers[1]} (stopped)" in capfd.readouterr().err
    assert 4 < time.monotonic() - began < 15 and all_end(workers)


def test_signals_that_are_for_the_rank_do_not_end_them(tmp_path):
    """In a process of its own: this one may be a copy of a process that has not blocked them."""
    code = f"""if True:
        import os, signal
        from pathlib import Path
        from tests.data.test_workers import begun, ONE_BY_ONE
        batches, workers = begun(Path({str(tmp_path)!r}), num_workers=2, **ONE_BY_ONE)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            for worker in workers:
                os.kill(worker, number)
        assert sum(next(batches).size for _ in range(40)) == 40
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
    """
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_they_end_with_a_rank_that_is_killed_and_need_no_guard_in_its_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import time\nfrom pathlib import Path\nfrom tests.data.test_workers import begun\n"
        f"batches, workers = begun(Path({str(tmp_path)!r}), num_workers=2)\n"
        "print(*workers, flush=True)\ntime.sleep(60)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True) as rank:
        workers = [int(number) for number in rank.stdout.readline().split()]
        rank.kill()
    assert len(workers) == 2 and all_end(workers)


def test_shared_memory_that_is_too_small_is_named(tmp_path):
    """In a file system of 256 kB, of which this user may make one; a micro-batch takes 786."""
    code = f"""if True:
        from pathlib import Path
        from tests.data.test_workers import loader, opened
        try:
            next(loader(opened(Path({str(tmp_path)!r}), size=256), num_workers=1).batches())
        except ChildProcessError as error:
            print(error)
    """
    mount = 'mount -t tmpfs -o size=256k none /dev/shm && exec "$0" -c "$1"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, sys.executable, code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "/dev/shm" in done.stdout and "--num-workers" in done.stdout, done.stderr


def test_an_error_of_the_program_tells_where_it_arose(tmp_path):
    with pytest.raises(KeyError, match="in decode"):
        next(loader(opened(tmp_path, Faulty), num_workers=1).batches())
