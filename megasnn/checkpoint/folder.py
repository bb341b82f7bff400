"""The folder of a run's checkpoints, in Megatron's shape. Nothing here knows tensors.

    checkpoints/
        latest_checkpointed_iteration.txt      "200", for people
        best_checkpointed_iteration.txt        "100": the best by validation, with --keep-best
        iter_0000100/
        iter_0000200/                          metadata.json and a safetensors file for each rank that writes
        iter_0000300.given_up/                 a later checkpoint than the one a run went back to, or a replaced one
        iter_0000300.tmp/                      being written, or left by a killed run: never loaded

A checkpoint is written aside, synced to disk and renamed. Before, checkpoints of the same and later iterations get
another name. So every iter_NNNNNNN is this run's, and the highest is the latest. A checkpoint to be removed is renamed
first: half of it is never taken for a checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megasnn.checkpoint.format import METADATA, STEP_FOLDER, Metadata, read_metadata, size_problem, to_text
from megasnn.common.files import CheckpointError, DamagedError, NoCheckpointError, read_regular, sync, write_whole

LATEST = "latest_checkpointed_iteration.txt"
BEST = "best_checkpointed_iteration.txt"


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"iter_{step:07d}"


def checkpoints(folder: Path) -> dict[int, Path]:
    """All checkpoints in a folder by iteration, ascending; empty without such a folder."""
    found = {}
    for path in folder.glob("iter_*"):
        match = STEP_FOLDER.fullmatch(path.name)
        if match:
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def list_checkpoints(folder: str | os.PathLike[str]) -> list[int]:
    """Iterations of all checkpoints in a folder, ascending; empty without such a folder."""
    return list(checkpoints(Path(folder)))


def require_empty(folder: Path) -> None:
    """Raises CheckpointError for a folder that holds checkpoints."""
    if there := list_checkpoints(folder):
        raise CheckpointError(f"{folder} holds checkpoints up to iteration {there[-1]}; give another --save")


def begin(folder: Path, step: int) -> Path:
    """Makes the empty folder that the checkpoint of this iteration is written into, until `commit_folder`.

    Raises:
        CheckpointError: the folder around it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is a file" if folder.is_file() else error.strerror
        raise CheckpointError(f"cannot make {folder} a folder of checkpoints: {reason}; choose another") from None
    discard(folder, step)
    _aside(folder, step).mkdir()
    return _aside(folder, step)


def _aside(folder: Path, step: int) -> Path:
    return folder / f"{step_folder(folder, step).name}.tmp"


def commit_folder(folder: Path, metadata: Metadata) -> Path:
    """Makes the files written since `begin` the checkpoint of their iteration, and the latest."""
    step = metadata.iteration
    aside = _aside(folder, step)
    final = step_folder(folder, step)
    write_whole(aside / METADATA, to_text(metadata))
    sync(aside)
    _give_up(folder, step)
    aside.rename(final)
    _name(folder, LATEST, step)
    return final


def go_back(folder: Path, step: int) -> None:
    """Makes the checkpoint of this iteration the latest. Later ones are given up."""
    _give_up(folder, step + 1)
    _name(folder, LATEST, step)


def forget_best_after(folder: Path, step: int, best: int | None) -> None:
    """Stops naming a checkpoint after this iteration the best, when a run continues from here.

    Args:
        best: iteration of the best so far. Its checkpoint is named in place, if it is still there.
    """
    named = _best(folder)
    if named is None or named <= step:
        return
    if best is not None and best in checkpoints(folder):
        _name(folder, BEST, best)
    else:
        (folder / BEST).unlink(missing_ok=True)


def name_best(folder: Path, step: int) -> None:
    """Names the checkpoint of this iteration the best by validation; `prune` keeps it."""
    _name(folder, BEST, step)


def _name(folder: Path, file: str, step: int) -> None:
    sync(folder)
    write_whole(folder / file, f"{step}\n")
    sync(folder)


def _give_up(folder: Path, step: int) -> None:
    """Renames checkpoints from this iteration on: the run has left their course."""
    for other, path in checkpoints(folder).items():
        if other >= step:
            given_up = path.with_name(f"{path.name}.given_up")
            number = 0
            while given_up.exists():
                number += 1
                given_up = path.with_name(f"{path.name}.given_up{number}")
            path.rename(given_up)


def discard(folder: Path, step: int) -> None:
    """Removes files written since `begin`."""
    shutil.rmtree(_aside(folder, step), ignore_errors=True)


def clean(folder: Path) -> None:
    """Removes half-written checkpoints of killed runs. Only the run that holds the folder's lock may call this."""
    for path in folder.glob("iter_*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def resolve(folder: Path, step: int | None) -> list[Path]:
    """Checkpoints to try, in this order.

    Only the one of iteration `step`; or the folder itself, if it is a checkpoint ("checkpoints/iter_0000100"); or all
    of the folder, the latest first.

    Raises:
        NoCheckpointError: there is no checkpoint at all.
        CheckpointError: there is none of this iteration; lists the others.
    """
    if not folder.is_dir():
        raise NoCheckpointError(f"there is no folder {folder} to load a checkpoint from; check its path (--load)")
    if (folder / METADATA).is_file():
        if step is not None and read_metadata(folder).iteration != step:
            raise CheckpointError(f"{folder} is a checkpoint itself, and not of {step} (--ckpt-step)")
        return [folder]
    found = checkpoints(folder)
    if step is not None:
        if step not in found:
            there = ", ".join(map(str, found)) or "none"
            raise CheckpointError(f"{folder} has no checkpoint of iteration {step} (--ckpt-step); complete: {there}")
        return [found[step]]
    if not found:
        kind = CheckpointError if (folder / LATEST).exists() else NoCheckpointError
        raise kind(f"{folder} holds no complete checkpoint; check its path (--load)")
    return [*reversed(found.values())]


@dataclass(frozen=True)
class ChosenCheckpoint:
    """A checkpoint to load, with its description.

    Attributes:
        folder: where it was looked for.
        older: checkpoints to try in this order where files of this one are damaged.
        remarks: for the user: newer checkpoints that were passed over, and why.
        by_step: it was asked for by its iteration, so that no other one may take its place.
    """

    folder: Path
    path: Path
    metadata: Metadata
    older: tuple[Path, ...] = ()
    remarks: tuple[str, ...] = ()
    by_step: bool = False


def choose_checkpoint(folder: Path, step: int | None) -> ChosenCheckpoint:
    """Chooses the checkpoint of iteration `step`, or the latest one with an intact description.

    Raises:
        NoCheckpointError, CheckpointError: as `resolve`.
        DamagedError: the description is damaged; without a `step`, all descriptions are.
    """
    paths = resolve(folder, step)
    if step is not None:
        return ChosenCheckpoint(folder, paths[0], read_metadata(paths[0]), by_step=True)
    return _newest_described(folder, paths, ())


def choose_older(damaged: ChosenCheckpoint, error: DamagedError) -> ChosenCheckpoint:
    """Chooses the next older checkpoint with an intact description.

    Raises:
        DamagedError: the same `error` where the damaged one was asked for by its iteration; or no other one is intact.
    """
    if damaged.by_step:
        raise error
    remarks = (*damaged.remarks, _passed_over(damaged.path, error))
    return _newest_described(damaged.folder, damaged.older, remarks)


def _newest_described(folder: Path, paths: Sequence[Path], remarks: tuple[str, ...]) -> ChosenCheckpoint:
    for position, path in enumerate(paths):
        try:
            metadata = read_metadata(path)
        except DamagedError as error:
            remarks = (*remarks, _passed_over(path, error))
        else:
            return ChosenCheckpoint(folder, path, metadata, tuple(paths[position + 1 :]), remarks)
    raise DamagedError(f"{folder} holds no checkpoint that is intact:", *remarks)


def _passed_over(path: Path, error: DamagedError) -> str:
    return f"{path} is damaged and was passed over: {error}"


def prune(folder: Path, last: int | None, every: int | None = None) -> Iterator[Path]:
    """Removes checkpoints, the oldest first, and yields the path of each removed one.

    Keeps the `last` newest (None: all), iterations divisible by `every`, and the best by validation. A checkpoint with
    missing or cut files is neither removed nor counted. A checkpoint saved after skipped steps counts separately: the
    weights may have gone bad before the first step that was not finite, so it does not push out one without.
    """
    if last is None:
        return
    best = _best(folder)
    found = dict[Path, Metadata]()
    for path in checkpoints(folder).values():
        with suppress(CheckpointError):
            metadata = read_metadata(path)
            if not any(size_problem(path / name, saved) for name, saved in metadata.files.items()):
                found[path] = metadata
    newest_first = [*reversed(found)]
    sound = [path for path in newest_first if not found[path].skipped_steps]
    kept = {*newest_first[:last], *sound[:last]}
    for path, metadata in found.items():
        if metadata.iteration == best or (every and metadata.iteration % every == 0):
            kept.add(path)
    for path in found:
        if path not in kept:
            aside = path.with_name(f"{path.name}.removed.tmp")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
            yield path


def _best(folder: Path) -> int | None:
    """Iteration in the file `BEST`; None without one."""
    with suppress(OSError, ValueError):
        return int(read_regular(folder / BEST))
    return None
