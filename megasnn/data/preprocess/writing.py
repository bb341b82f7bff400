"""Writes a data set's shards in parallel, and their index."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from pydantic_core import to_json
from tqdm import tqdm

from megasnn.common.files import sync
from megasnn.data.preprocess.sources import Item, Listing
from megasnn.data.shards import INDEX_NAME, Index, ShardRecord, scan
from megasnn.data.workers import end_with_parent

Sample = tuple[str, Mapping[str, bytes]]
"""Key, and contents of its files by ending."""
Encode = Callable[[Item], Mapping[str, bytes]]
"""Item -> its files by ending. Raises ValueError for a broken item; can be pickled."""
ShardTask = tuple[Path, str, list[Item]]
"""A shard to write: path, split, items."""


def preprocess(
    listing: Listing,
    encode: Encode,
    output: Path,
    samples_per_shard: int,
    workers: int = 1,
    skip_broken: bool = False,
) -> Index:
    """Writes shards and index; returns the index. The bytes do not depend on `workers`.

    Args:
        output: a new or empty folder.
        skip_broken: leave out and count broken items.

    Raises:
        ValueError: the folder exists or cannot be written, or an item is broken. Nothing remains on disk.
    """
    with new_folder(output) as aside:
        tasks: list[ShardTask] = []
        for split, items in listing.splits.items():
            for number, start in enumerate(range(0, len(items), samples_per_shard)):
                path = aside / f"{split}-{number:05d}.tar"
                tasks.append((path, split, items[start : start + samples_per_shard]))
        records = _write_shards(partial(_write_task, encode, skip_broken), tasks, workers)
        index = Index(listing.classes, records)
        (aside / INDEX_NAME).write_bytes(to_json(asdict(index)))
        sync(aside / INDEX_NAME)
    return index


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `output` at the end of the block; after an error nothing remains.

    Raises ValueError if `output` exists and is not empty, or cannot be written.
    """
    # Renamed at the end: a folder `output` is complete, even after a power cut.
    aside = output.with_name(f"{output.name}.partial")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output {output} exists and is no empty folder; choose another folder, or remove it")
    if aside.exists():
        raise ValueError(f"{aside} exists: another run writes to it, or was killed; wait for it, or remove it")
    with _named(output):
        try:
            aside.mkdir(parents=True)
            yield aside
            os.replace(aside, output)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise


def write_shard(path: Path, samples: Iterable[Sample]) -> None:
    """Writes a shard whose bytes depend on `samples` only."""
    # The writer in its ShardWriter; imports torch.
    from webdataset import TarWriter

    # Constant owner, rights and time of change. GNU's format has names of any length.
    attributes: dict[str, Any] = {"user": "", "group": "", "mode": 0o644, "mtime": 0, "format": "GNU_FORMAT"}
    with open(path, "wb") as file, TarWriter(file, encoder=False, compress=False, **attributes) as archive:
        for key, files in samples:
            archive.write({"__key__": key, **files})
    sync(path)


def _write_shards(write: Callable[..., ShardRecord], tasks: Sequence[ShardTask], workers: int) -> list[ShardRecord]:
    """Writes all shards; after an error, starts no more."""
    with ExitStack() as stack:
        run: Callable[..., Iterator[ShardRecord]] = map
        if workers > 1:
            # A forked copy of a process with threads may wait for a lock forever.
            context = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(min(workers, len(tasks)), context, _start_worker)
            stack.callback(pool.shutdown, cancel_futures=True)
            run = pool.map
        records = run(write, *zip(*tasks, strict=True))
        return list(tqdm(records, total=len(tasks), unit=" shards", disable=None))


def _write_task(encode: Encode, skip_broken: bool, path: Path, split: str, items: list[Item]) -> ShardRecord:
    broken: list[str] = []

    def samples() -> Iterator[Sample]:
        for item in items:
            try:
                files = encode(item)
            except (ValueError, OSError) as error:
                if not skip_broken:
                    raise ValueError(f"{error}; repair it, or leave out broken samples with --skip-broken") from error
                # index.json cannot hold a file name that is not UTF-8.
                broken.append(str(error).encode("utf-8", "backslashreplace").decode())
            else:
                yield item.key, {**files, "cls": str(item.label).encode()}
        if len(broken) == len(items):
            raise ValueError(f"all {len(items)} samples of {path.name} are broken; the first: {broken[0]}")

    with _named(path):
        write_shard(path, samples())
    return ShardRecord(path.name, split, path.stat().st_size, broken, scan(path, str(path)))


def _start_worker() -> None:
    # Ctrl-C is for the parent process, with which a worker ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error
