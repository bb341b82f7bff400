"""The folder of a run's checkpoints, in Megatron's shape. Nothing here knows tensors.

    checkpoints/
        latest_checkpointed_iteration.txt      "200", for people
        best_checkpointed_iteration.txt        "100": the best by validation, with --keep-best
        iter_0000100/
        iter_0000200/                          metadata.json and a safetensors file for each rank that writes
        iter_0000300.given_up/                 of a course that the run has left, or replaced
        iter_0000300.tmp/                      being written, or left by a run that was killed: never loaded

A checkpoint is written aside, synced to disk and renamed. Those of its iteration and later ones get another name
before, so that every iter_NNNNNNN is this run's, and the latest is the last of them. A removed one is renamed first, so
that half of it is not taken for a checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from megasnn.checkpoint.format import METADATA, STEP_FOLDER, Metadata, read_metadata, size_problem, to_text
from megasnn.common.files import CheckpointError, DamagedError, NoCheckpointError, read_regular, sync, write_whole

LATEST = "latest_checkpointed_iteration.txt"
BEST = "best_checkpointed_iteration.txt"


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"iter_{step:07d}"


def checkpoints(folder: Path) -> dict[int, Path]:
    """All checkpoints in a folder by iteration, ascending; empty without such a folder."""
    names = ((STEP_FOLDER.fullmatch(path.name), path) for path in folder.glob("iter_*"))
    return dict(sorted((int(match[1]), path) for match, path in names if match))


def list_checkpoints(folder: str | os.PathLike[str]) -> list[int]:
    """Iterations of all checkpoints in a folder, ascending; empty without such a folder."""
    return list(checkpoints(Path(folder)))


# --- writing


def require_empty(folder: Path) -> None:
    """Raises CheckpointError for a folder that holds checkpoints."""
    if there := list_checkpoints(folder):
        raise CheckpointError(f"{folder} holds checkpoints up to iteration {there[-1]}; give another --save")


def begin(folder: Path, step: int) -> Path:
    """Makes an empty folder to write the checkpoint of this iteration into, until `commit_folder`. Raises
    CheckpointError where the folder around it cannot be made."""
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
    """Makes the files written since `begin` the checkpoint of their iteration and the latest, on disk."""
    step = metadata.iteration
    aside, final = _aside(folder, step), step_folder(folder, step)
    write_whole(aside / METADATA, to_text(metadata))
    sync(aside)
    _give_up(folder, step)
    aside.rename(final)
    _name(folder, LATEST, step)
    return final


def go_back(folder: Path, step: int) -> None:
    """Makes the checkpoint of this iteration the latest: a run goes on from it, and gives up those after it."""
    _give_up(folder, step + 1)
    _name(folder, LATEST, step)


def forget_best_after(folder: Path, step: int, best: int | None) -> None:
    """Takes the name of the best from a checkpoint after this iteration, from which a run goes on.

    Args:
        best: iteration of the best until then. Its checkpoint gets the name, where it is still there.
    """
    named = _best(folder)
    if named is None or named <= step:
        return
    if best is not None and best in checkpoints(folder):
        _name(folder, BEST, best)
    else:
        (folder / BEST).unlink(missing_ok=True)


def name_best(folder: Path, step: int) -> None:
    """Names the checkpoint of this iteration the best by validation, which stays."""
    _name(folder, BEST, step)


def _name(folder: Path, file: str, step: int) -> None:
    sync(folder)
    write_whole(folder / file, f"{step}\n")
    sync(folder)


def _give_up(folder: Path, step: int) -> None:
    """Gives other names to checkpoints from this iteration on: they are of a course that the run has left."""
    for other, path in checkpoints(folder).items():
        if other >= step:
            names = (path.with_name(f"{path.name}.given_up{number or ''}") for number in count())
            path.rename(next(name for name in names if not name.exists()))


def discard(folder: Path, step: int) -> None:
    """Removes files written since `begin`."""
    shutil.rmtree(_aside(folder, step), ignore_errors=True)


def clean(folder: Path) -> None:
    """Removes half-written checkpoints of killed runs. Only for the run that holds the folder's lock."""
    for path in folder.glob("iter_*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


# --- reading


def resolve(folder: Path, step: int | None) -> list[Path]:
    """Checkpoints to try, in this order: that of iteration `step` alone, or of a folder that is one itself
    ("checkpoints/iter_0000100"); or the latest, and after it those before it.

    Raises:
        NoCheckpointError: there is none at all.
        CheckpointError: the one of this iteration is not there; says which exist.
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


# --- retention


def prune(folder: Path, last: int | None, every: int | None = None) -> Iterator[Path]:
    """Removes checkpoints, the oldest first, and yields each that is gone.

    The last so many stay (all: None), those of iterations divisible by `every`, and the best by validation.
    One with missing or cut files neither goes nor counts. One that followed skipped steps does not push out one that
    did not: the weights may have gone bad before the first step that was not finite.
    """
    if last is None:
        return
    best, found = _best(folder), dict[Path, Metadata]()
    for path in checkpoints(folder).values():
        with suppress(CheckpointError):
            metadata = read_metadata(path)
            if not any(size_problem(path / name, saved) for name, saved in metadata.files.items()):
                found[path] = metadata
    newest_first = [*reversed(found)]
    sound = [path for path in newest_first if not found[path].skipped_steps]
    stay = {*newest_first[:last], *sound[:last]}
    stay |= {path for path, metadata in found.items() if metadata.iteration == best}
    stay |= {path for path in found if every and found[path].iteration % every == 0}
    for path in found:
        if path not in stay:
            aside = path.with_name(f"{path.name}.removed.tmp")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
            yield path


def _best(folder: Path) -> int | None:
    """Iteration that `BEST` names; None where it names none."""
    with suppress(OSError, ValueError):
        return int(read_regular(folder / BEST))
    return None
