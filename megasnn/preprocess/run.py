"""A whole run: plan, shards, index. A run that was killed continues with the shards that are missing."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megasnn.data.index import INDEX_NAME, WORK_FOLDER, Index, ShardRecord, read_index
from megasnn.files.described import FreeForm, read_described
from megasnn.files.locks import LockError, held
from megasnn.preprocess.items import Listing, shuffled
from megasnn.preprocess.pool import Encode, ShardTask, write_shards
from megasnn.preprocess.writing import PARTIAL, write_json

_PLAN = "plan.json"


@dataclass(frozen=True)
class Job:
    """What is to be made of a data set.

    Attributes:
        output: folder for the shards.
        listing: what goes into them.
        encode: makes the files of a sample.
        options: everything else that the contents of the shards depend on, as JSON values.
        seed: of the order; None keeps the listing's.
        skip_broken: leave out and count items that cannot be used.
    """

    output: Path
    listing: Listing
    encode: Encode
    options: dict[str, Any]
    samples_per_shard: int = 500
    seed: int | None = 1234
    skip_broken: bool = False

    def plan(self) -> dict[str, Any]:
        """What makes two runs the same, as it is kept in the output folder.

        `skip_broken` is not part of it: a run that stopped at a broken sample may go on without it.
        """
        return {
            **self.options,
            "samples_per_shard": self.samples_per_shard,
            "seed": self.seed,
            "samples": {split: len(items) for split, items in self.listing.splits.items()},
            "listing": self.listing.fingerprint(),
        }


def preprocess(job: Job, workers: int = 1) -> Index:
    """Write the shards of a job that are not there yet, then the index; returns it.

    The shards are the same for any number of workers, and however often a run was interrupted.

    Raises:
        ValueError: a split or a class is empty; the folder holds the shards of other options, or something else;
            another run works in it; an item cannot be used (without `skip_broken`); a shard cannot be written. What
            is finished stays.
    """
    job.listing.check()
    plan = job.plan()
    _require_place(job.output, plan)
    with _only_run_in(job.output):
        done = _begin(job.output, plan)
        tasks = list(_tasks(job))
        missing = [task for task in tasks if not _is_finished(task, done)]
        total, left = (sum(len(task.items) for task in some) for some in (tasks, missing))
        with tqdm(total=total, initial=total - left, unit=" samples", desc=str(job.output), disable=None) as bar:
            for task, record in write_shards(missing, workers, bar):
                write_json(_record_path(job.output, task.path.name), asdict(record))
                done[task.path.name] = record
        index = Index(plan, job.listing.classes, [done[task.path.name] for task in tasks])
        write_json(job.output / INDEX_NAME, {"version": index.version, **asdict(index)})
        shutil.rmtree(job.output / WORK_FOLDER)
    return index


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.tar"


def _tasks(job: Job) -> Iterator[ShardTask]:
    for split, items in job.listing.splits.items():
        ordered = items if job.seed is None else shuffled(items, job.seed, split)
        for number, start in enumerate(range(0, len(ordered), job.samples_per_shard)):
            part = ordered[start : start + job.samples_per_shard]
            yield ShardTask(job.output / shard_name(split, number), split, part, job.encode, job.skip_broken)


def _require_place(output: Path, plan: dict[str, Any]) -> None:
    """Raises ValueError when the output folder holds anything but the work of this plan. Writes nothing."""
    index, kept = read_index(output), output / WORK_FOLDER / _PLAN
    if index is not None:
        _require_same(output, index.options, plan)
    elif kept.exists():
        if any(output.glob("*.tar")):
            _require_same(output, read_described(FreeForm, kept), plan)
    elif output.exists() and not output.is_dir():
        raise ValueError(f"--output {output} is a file; choose a folder")
    elif output.exists() and any(entry.name != WORK_FOLDER for entry in output.iterdir()):
        raise ValueError(f"--output {output} is not empty, and what is in it was not made here; choose another folder")


def _require_same(output: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    differing = [
        f"{name} {before.get(name)!r} then, {now.get(name)!r} now"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
    if differing:
        raise ValueError(
            f"{output} holds shards that were made from other data or with other options ({'; '.join(differing)}); "
            f"choose another --output, or remove that folder"
        )


@contextlib.contextmanager
def _only_run_in(output: Path) -> Iterator[None]:
    """Lock the folder; what a killed run left half-written is removed, and so is what this one leaves.

    Raises:
        ValueError: another run writes into it, or it cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            (output / WORK_FOLDER).mkdir(parents=True, exist_ok=True)
            stack.enter_context(held(output / WORK_FOLDER / "lock", "preprocesses", seconds=0))
        except OSError as error:
            raise ValueError(f"--output {output} cannot be written ({error})") from error
        except LockError as error:
            raise ValueError(
                f"another run is writing into {output}: {error}; wait for it, or choose another --output"
            ) from None
        _remove_partial(output)
        try:
            yield
        finally:
            _remove_partial(output)


def _begin(output: Path, plan: dict[str, Any]) -> dict[str, ShardRecord]:
    """Keep the plan; returns the records of the shards that were finished before."""
    write_json(output / WORK_FOLDER / _PLAN, plan)
    index = read_index(output)
    records = list(index.shards) if index is not None else []
    records += [read_described(ShardRecord, path) for path in (output / WORK_FOLDER).glob("*.tar.json")]
    return {record.file: record for record in records}


def _is_finished(task: ShardTask, done: dict[str, ShardRecord]) -> bool:
    record = done.get(task.path.name)
    if record is None or (record.broken and not task.skip_broken):
        return False
    return task.path.is_file() and task.path.stat().st_size == record.size


def _record_path(output: Path, shard: str) -> Path:
    return output / WORK_FOLDER / f"{shard}.json"


def _remove_partial(output: Path) -> None:
    for path in output.glob(f"*{PARTIAL}"):
        path.unlink(missing_ok=True)
