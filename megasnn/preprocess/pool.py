"""Shards written by several processes, one shard at a time each, with a progress bar that counts samples."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for_end
from pathlib import Path

from tqdm import tqdm

from megasnn.data.index import ShardRecord
from megasnn.preprocess.items import Item, as_text
from megasnn.preprocess.writing import Sample, write_shard

Encode = Callable[[Item], Mapping[str, bytes]]
"""Reads an item and returns its files by suffix. Raises ValueError for one that cannot be used; must be picklable."""
_REFRESH_SECONDS = 0.2


@dataclass(frozen=True)
class ShardTask:
    """One shard to be written.

    Attributes:
        skip_broken: leave out, and record, items that cannot be used.
    """

    path: Path
    split: str
    items: list[Item]
    encode: Encode
    skip_broken: bool


def write_shards(tasks: list[ShardTask], workers: int, bar: tqdm) -> Iterator[tuple[ShardTask, ShardRecord]]:
    """Each task with its record, in the order in which they get done; the first error ends all.

    Raises:
        ValueError: an item cannot be used, or a shard cannot be written; a worker process was killed.
    """
    if workers == 1 or len(tasks) <= 1:
        for task in tasks:
            yield task, write_task(task, lambda: bar.update(1))
        return
    context = multiprocessing.get_context("spawn")
    samples = context.Value("q", 0)
    pool = ProcessPoolExecutor(min(workers, len(tasks)), context, _start_worker, (samples,))
    begun = bar.n
    waiting: dict[Future[ShardRecord], ShardTask] = {}
    rest = iter(tasks)
    try:
        while True:
            # No more than can be begun soon: a large data set is thousands of shards, each with a list of items.
            while len(waiting) < 2 * workers and (coming := next(rest, None)) is not None:
                waiting[pool.submit(_work, coming)] = coming
            if not waiting:
                break
            for future in wait(waiting, _REFRESH_SECONDS, FIRST_COMPLETED).done:
                yield waiting.pop(future), future.result()
            bar.update(begun + samples.value - bar.n)
    except BrokenProcessPool as error:
        raise ValueError(
            "a worker process ended without a word (killed, or out of memory?); try fewer --workers"
        ) from error
    finally:
        _end(pool)


def write_task(task: ShardTask, after_each: Callable[[], object]) -> ShardRecord:
    """Write one shard; `after_each` is called for every item.

    Raises:
        ValueError: an item cannot be used, or with `skip_broken` none of them can; the shard cannot be written.
    """
    broken: list[str] = []
    samples, size, sha256 = write_shard(task.path, _samples(task, broken, after_each))
    return ShardRecord(task.path.name, task.split, samples, size, sha256, broken)


def _samples(task: ShardTask, broken: list[str], after_each: Callable[[], object]) -> Iterator[Sample]:
    """The samples of a task; those left out are added to `broken`, with the reason."""
    for item in task.items:
        try:
            files = task.encode(item)
        except ValueError as error:
            if not task.skip_broken:
                raise ValueError(f"{error}; mend it, or leave such samples out with --skip-broken") from error
            broken.append(as_text(str(error)))
        else:
            yield item.key, {**files, "cls": str(item.label).encode()}
        after_each()
    if len(broken) == len(task.items):
        raise ValueError(f"none of the {len(broken)} samples of {task.path} can be used; the first: {broken[0]}")


_counter = None  # of all workers together, set where one starts


def _start_worker(counter) -> None:  # multiprocessing's Synchronized has no public type
    global _counter
    _counter = counter
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    """A worker that outlives a killed parent would write into the folder while the next run does."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for_end([parent.sentinel])
    os._exit(1)


def _work(task: ShardTask) -> ShardRecord:
    def count() -> None:
        assert _counter is not None
        with _counter.get_lock():
            _counter.value += 1

    return write_task(task, count)


def _end(pool: ProcessPoolExecutor) -> None:
    """End the workers at once, also in the middle of a shard."""
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        with contextlib.suppress(OSError):
            process.terminate()
        process.join()
