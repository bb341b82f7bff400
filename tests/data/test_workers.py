"""The processes that read ahead: several at a time, gone with the iterator, missed when they are lost."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
import time
from functools import partial
from multiprocessing import reduction
from pathlib import Path

import pytest
import torch

from megasnn.data import processes as processes_
from megasnn.data.dataset import ShardDataset
from megasnn.data.images import ImageFormat
from megasnn.data.memory import SharedPlaces, new_piece
from megasnn.data.processes import template
from megasnn.data.shards import open_shard
from tests.data.shard_files import CLASSES, loader, write_shards
from tests.data.watched import Faulty, Watched, processes, wait_until

ONE_BY_ONE = {"global_batch_size": 1, "micro_batch_size": 1}


def opened(tmp_path: Path, format: ImageFormat) -> ShardDataset:
    return ShardDataset([open_shard(path) for path in write_shards(tmp_path, 23, 9)], format, CLASSES)


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    folder = tmp_path / "traces"
    folder.mkdir()
    return folder


def watched(tmp_path: Path, traces: Path, workers: int = 0) -> ShardDataset:
    return opened(tmp_path, Watched(8, 1, folder=str(traces), workers=workers))


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_workers_are_processes_without_torch_that_read_at_the_same_time(tmp_path, traces) -> None:
    """With one micro-batch a batch, each of three must be given one of its own to meet the others."""
    batches = loader(watched(tmp_path, traces, workers=3), num_workers=3, **ONE_BY_ONE).batches()
    assert next(batches).micro_batches[0].size == 1
    assert len(processes(traces)) == 3 and os.getpid() not in processes(traces)
    assert {trace.read_text() for trace in traces.iterdir()} == {"False"}, "a worker imports torch"
    batches.close()


def test_they_read_ahead_and_end_with_the_iterator(tmp_path, traces) -> None:
    batches = loader(watched(tmp_path, traces), num_workers=1).batches()
    next(batches)
    wait_until(lambda: len(os.listdir(traces)) >= 20)
    time.sleep(0.2)
    assert len(os.listdir(traces)) == 20, "it reads further ahead than the next batch"
    batches.close()
    assert not any(alive(process) for process in processes(traces))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("megasnn-data")]


def test_what_was_consumed_is_not_read_again(tmp_path, traces) -> None:
    (batch,) = loader(watched(tmp_path, traces), num_workers=2).batches(30, limit=1)
    read = [int(name.split("-")[1]) for name in os.listdir(traces)]
    assert sorted(read) == sorted(number for part in batch.micro_batches for number in part.sample_ids.tolist())


def test_what_was_handed_out_stays_as_it_is(tmp_path, monkeypatch) -> None:
    """Although its memory is used again where nobody holds it any more."""
    dataset = opened(tmp_path, ImageFormat(8, 1))
    expected = [part.images for batch in loader(dataset).batches(limit=12) for part in batch.micro_batches]
    held = [part.images for b in loader(dataset, num_workers=2).batches(limit=12) for part in b.micro_batches]
    assert all(torch.equal(one, other) for one, other in zip(held, expected, strict=True))

    batches = loader(dataset, num_workers=2).batches(limit=60)
    kept = next(batches).micro_batches[0].images
    used = set()
    at = SharedPlaces.at
    monkeypatch.setattr(SharedPlaces, "at", lambda self, place, size: used.add(place) or at(self, place, size))
    for batch in batches:
        del batch
    assert torch.equal(kept, expected[0])
    assert 0 < max(used) < 24, f"a worker filled {max(used) + 1} places for 120 micro-batches"


def test_more_micro_batches_are_held_than_files_may_be_open(tmp_path) -> None:
    dataset = opened(tmp_path, ImageFormat(8, 1))
    expected = [batch.micro_batches[0].images for batch in loader(dataset, **ONE_BY_ONE).batches(limit=100)]
    next(loader(dataset, num_workers=1, **ONE_BY_ONE).batches())
    before = len(os.listdir("/proc/self/fd"))
    batches = loader(dataset, num_workers=1, **ONE_BY_ONE).batches(limit=100)
    held = [batch.micro_batches[0].images for batch in batches]
    assert len(os.listdir("/proc/self/fd")) < before + 30
    assert all(torch.equal(one, other) for one, other in zip(held, expected, strict=True))


def test_places_lie_in_pieces_that_double_and_grow(tmp_path) -> None:
    """Both sides see the same bytes, also of a place whose piece was replaced by a larger one."""
    writer, reader = SharedPlaces(), SharedPlaces()
    pieces = 0
    for size in (100, 300):
        views = []
        for place in range(20):
            if not writer.fits(place, size):
                pieces += 1
                descriptor = new_piece(place, size)
                writer.add(place, descriptor)
                reader.add(place, descriptor)
                os.close(descriptor)
            writer.at(place, size)[:] = bytes([place + size // 100]) * size
            views.append(reader.at(place, size))
        assert [bytes(view) for view in views] == [bytes([place + size // 100]) * size for place in range(20)]
    assert pieces == 2 * 5


def test_descriptors_whose_receipt_is_acknowledged(tmp_path, monkeypatch) -> None:
    """As on macOS, where the acknowledgement must not be looked for among the tasks."""
    monkeypatch.setattr(reduction, "ACKNOWLEDGE", True)
    monkeypatch.setattr(processes_, "_template", None)
    dataset = opened(tmp_path, ImageFormat(8, 1))
    monkeypatch.setattr(subprocess, "Popen", partial(_acknowledging, subprocess.Popen))
    images = [part.images for batch in loader(dataset, num_workers=1).batches(limit=3) for part in batch.micro_batches]
    expected = [part.images for batch in loader(dataset).batches(limit=3) for part in batch.micro_batches]
    assert all(torch.equal(one, other) for one, other in zip(images, expected, strict=True))


def _acknowledging(start, command, **options):
    program = (
        "import multiprocessing.reduction as reduction, runpy; reduction.ACKNOWLEDGE = True; "
        "runpy.run_module('megasnn.data.worker', run_name='__main__')"
    )
    return start([command[0], "-P", "-c", program, command[-1]], **options)


def test_a_removed_working_folder_is_an_error(tmp_path, monkeypatch) -> None:
    dataset = opened(tmp_path, ImageFormat(8, 1))
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ChildProcessError, match="the working folder has been removed"):
        next(loader(dataset, num_workers=1).batches())


def test_a_template_that_was_told_half_is_ended(tmp_path, monkeypatch) -> None:
    """It would wait for ever for the descriptors, and the rank for its end."""
    dataset = opened(tmp_path, ImageFormat(8, 1))
    before = template()

    def refuse(*args):
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(processes_, "send_handle", refuse)
        with pytest.raises(ChildProcessError, match="too many open files.*their template ended with status -9"):
            next(loader(dataset, num_workers=1).batches())
    assert not before.usable
    assert next(loader(dataset, num_workers=1).batches()).size == 10


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_lost_worker_is_missed_at_once(tmp_path, traces, number) -> None:
    batches = loader(watched(tmp_path, traces), num_workers=2).batches()
    next(batches)
    wait_until(lambda: len(processes(traces)) == 2)
    lost = min(processes(traces))
    os.kill(lost, number)
    began = time.monotonic()
    with pytest.raises(ChildProcessError, match=f"data worker {lost} was killed by {number.name}"):
        for _ in range(20):
            next(batches)
    assert time.monotonic() - began < 3
    assert not any(alive(process) for process in processes(traces))


def test_signals_that_are_for_the_rank_do_not_end_them(tmp_path, traces) -> None:
    batches = loader(watched(tmp_path, traces), num_workers=2, **ONE_BY_ONE).batches()
    next(batches)
    wait_until(lambda: len(processes(traces)) == 2)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        for process in processes(traces):
            os.kill(process, number)
    assert sum(next(batches).size for _ in range(40)) == 40
    batches.close()


def test_a_lost_template_is_replaced(tmp_path, traces) -> None:
    batches = loader(watched(tmp_path, traces), num_workers=1).batches()
    next(batches)
    before = template()
    os.kill(before._process.pid, signal.SIGKILL)
    before._process.wait()
    next(batches)  # what runs goes on
    batches.close()
    wait_until(lambda: not any(alive(process) for process in processes(traces)))
    assert next(loader(watched(tmp_path, traces), num_workers=1).batches()).size == 10
    assert template() is not before


def test_an_error_tells_where_it_arose(tmp_path) -> None:
    """Also one that cannot be pickled."""
    batches = loader(opened(tmp_path, Faulty(8, 1)), num_workers=1).batches()
    with pytest.raises(RuntimeError, match="Unportable: 1 and 2 do not go together") as caught:
        next(batches)
    assert "in decode" in caught.value.__notes__[0] and "data worker" in caught.value.__notes__[0]
