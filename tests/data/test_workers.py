"""Worker processes: gone with the iterator and with the rank, named when they are lost, stopped or without memory."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import connection
from pathlib import Path

import pytest

from tests.data.shard_files import loader, open_all, write_shards

ONE_BY_ONE = {"global_batch_size": 1, "micro_batch_size": 1}
ROOT = Path(__file__).parents[2]


def begun(tmp_path: Path, **options):
    """A loader with workers that has given a batch, and their process ids."""
    before = multiprocessing.active_children()
    batches = loader(open_all(write_shards(tmp_path, 23, 9)), **options).batches()
    next(batches)
    return batches, [each.pid for each in multiprocessing.active_children() if each not in before]


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_end(processes: list[int], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_alive, processes))


def test_a_lost_worker_is_named_and_all_end_with_the_iterator(tmp_path):
    batches, workers = begun(tmp_path, num_workers=2, **ONE_BY_ONE)
    batches.close()
    assert len(workers) == 2 and all_end(workers, 2)
    batches, workers = begun(tmp_path, num_workers=2, **ONE_BY_ONE)
    os.kill(workers[0], signal.SIGKILL)
    with pytest.raises(ChildProcessError, match=str(workers[0])):
        for _ in range(50):
            next(batches)
    assert all_end(workers)


def test_no_descriptor_is_closed_twice(tmp_path, monkeypatch):
    """Also where torch's iterator is garbage in a circle, and a worker was never asked for anything."""
    twice = []

    def close(pipe: connection.Connection) -> None:
        try:
            os.close(pipe.fileno())
            time.sleep(0.01)  # another thread takes its turn before the pipe knows that it is closed
        except OSError:
            twice.append(threading.current_thread().name)

    monkeypatch.setattr(connection.Connection, "_close", close)
    for _ in range(3):
        made = loader(open_all(write_shards(tmp_path, 4, 4)), num_workers=2, global_batch_size=1, micro_batch_size=1)
        assert len(list(made.batches(limit=1))) == 1
        for each in gc.get_objects():
            if type(each).__name__ == "_MultiProcessingDataLoaderIter":
                each.itself = each
        made.close()
        del made, each
        gc.collect()
    assert not twice


def test_a_stopped_worker_ends_the_run(tmp_path):
    batches, workers = begun(tmp_path, num_workers=2, timeout=3.0, **ONE_BY_ONE)
    os.kill(workers[1], signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(ChildProcessError, match=f"for 3 s.*{workers[1]}.*--num-workers"):
        for _ in range(50):
            next(batches)
    assert 2 < time.monotonic() - began < 15 and all_end(workers)


def test_workers_outlive_the_ranks_signals_end_with_it_and_need_no_guard_in_its_script(tmp_path):
    """The script runs in a process of its own: this one may be a copy of one that has not blocked the signals."""
    script = tmp_path / "script.py"
    script.write_text(f"""if True:
        import os, signal, time
        from pathlib import Path
        from tests.data.test_workers import begun, ONE_BY_ONE
        batches, workers = begun(Path({str(tmp_path)!r}), num_workers=2, **ONE_BY_ONE)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            for worker in workers:
                os.kill(worker, number)
        assert sum(next(batches).size for _ in range(40)) == 40
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
        print(*workers, flush=True)
        time.sleep(60)
    """)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True) as rank:
        workers = [int(number) for number in rank.stdout.readline().split()]
        rank.kill()
    assert len(workers) == 2 and all_end(workers)


def test_shared_memory_that_is_too_small_is_named(tmp_path):
    """In a file system of 256 kB, of which this user may make one; a micro-batch takes 786."""
    code = f"""if True:
        from pathlib import Path
        from tests.data.test_workers import loader, open_all, write_shards
        try:
            next(loader(open_all(write_shards(Path({str(tmp_path)!r}), 23, 9), size=256), num_workers=1).batches())
        except ChildProcessError as error:
            print(error)
    """
    mount = 'mount -t tmpfs -o size=256k none /dev/shm && exec "$0" -c "$1"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, sys.executable, code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "/dev/shm" in done.stdout and "--num-workers" in done.stdout, done.stderr
