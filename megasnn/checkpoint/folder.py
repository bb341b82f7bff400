"""A run's checkpoints, in Megatron's shape. Nothing here knows tensors.

    checkpoints/
        latest_checkpointed_iteration.txt      "200", for people
        best_checkpointed_iteration.txt        "100": the best by validation, with --keep-best
        iter_0000100/
        iter_0000200/                          metadata.json and a safetensors file for each rank that writes
        iter_0000300.given_up/                 later than the one a run went back to, or replaced
        iter_0000300.tmp/                      being written, or left by a killed run: never loaded

A checkpoint is written aside, synced to disk and renamed. The highest iter_NNNNNNN is the latest.
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
    """Ascending; empty without such a folder."""
    found = {}
    for path in folder.glob("iter_*"):
        match = STEP_FOLDER.fullmatch(path.name)
        if match:
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def list_checkpoints(folder: str | os.PathLike[str]) -> list[int]:
    """Iterations, ascending; empty without such a folder."""
    return list(checkpoints(Path(folder)))


def require_empty(folder: Path) -> None:
    """Raises CheckpointError for a folder with checkpoints."""
    if there := list_checkpoints(folder):
        raise CheckpointError(f"{folder} holds checkpoints up to iteration {there[-1]}; give another --save")


def begin(folder: Path, step: int) -> Path:
    """Makes an empty folder, until `commit_folder`. Raises CheckpointError if it cannot."""
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
    """Makes the files written since `begin` the latest checkpoint."""
    step = metadata.iteration
    aside = _aside(folder, step)
    final = step_folder(folder, step)
    write_whole(aside / METADATA, to_text(metadata))
    # The files must be on disk before their name is: a rename may survive a power cut that its content does not.
    sync(aside)
    # Before the new name: a run that is killed between both has lost no iter_NNNNNNN of its own course.
    _give_up(folder, step)
    aside.rename(final)
    # For people alone: loading takes the highest number, so a kill before this line does no harm.
    _name(folder, LATEST, step)
    return final


def go_back(folder: Path, step: int) -> None:
    """Makes this checkpoint the latest. Later ones are given up."""
    _give_up(folder, step + 1)
    _name(folder, LATEST, step)


def forget_best_after(folder: Path, step: int, best: int | None) -> None:
    """Withdraws the best checkpoint if it is later than the one that the run continues from.

    Args:
        best: the best iteration up to there, named in its place if it exists.
    """
    named = _best(folder)
    if named is None or named <= step:
        return
    if best is not None and best in checkpoints(folder):
        _name(folder, BEST, best)
    else:
        (folder / BEST).unlink(missing_ok=True)


def name_best(folder: Path, step: int) -> None:
    """Names the best checkpoint, which `prune` keeps."""
    _name(folder, BEST, step)


def _name(folder: Path, file: str, step: int) -> None:
    # The renames before are on disk first: a file never names a checkpoint that a power cut takes back.
    sync(folder)
    write_whole(folder / file, f"{step}\n")
    sync(folder)


def _give_up(folder: Path, step: int) -> None:
    for other, path in checkpoints(folder).items():
        # Renamed, not removed: they are of another course of the run, and someone may want them back.
        if other >= step:
            given_up = path.with_name(f"{path.name}.given_up")
            number = 0
            # A run may go back more than once.
            while given_up.exists():
                number += 1
                given_up = path.with_name(f"{path.name}.given_up{number}")
            path.rename(given_up)


def discard(folder: Path, step: int) -> None:
    shutil.rmtree(_aside(folder, step), ignore_errors=True)


def clean(folder: Path) -> None:
    """Removes half-written checkpoints. Only the lock's holder may call it."""
    for path in folder.glob("iter_*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def checkpoints_to_try(folder: Path, step: int | None) -> list[Path]:
    """Checkpoints to try, in this order.

    Iteration `step` alone; the folder itself ("checkpoints/iter_0000100"); or all, the latest first.

    Raises:
        NoCheckpointError: no checkpoint at all.
        CheckpointError: none at this iteration; lists the others.
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
        # A folder that names its latest checkpoint has lost it: this is no first start, which may begin anew.
        kind = CheckpointError if (folder / LATEST).exists() else NoCheckpointError
        raise kind(f"{folder} holds no complete checkpoint; check its path (--load)")
    return [*reversed(found.values())]


@dataclass(frozen=True)
class ChosenCheckpoint:
    """A checkpoint to load, with its description.

    Attributes:
        older: next to try where files are damaged, in order.
        remarks: for the user: newer checkpoints passed over, and why.
        by_step: asked for by iteration, so no other may replace it.
    """

    folder: Path
    path: Path
    metadata: Metadata
    older: tuple[Path, ...] = ()
    remarks: tuple[str, ...] = ()
    by_step: bool = False


def choose_checkpoint(folder: Path, step: int | None) -> ChosenCheckpoint:
    """Iteration `step`, or the latest with an intact description.

    Raises:
        NoCheckpointError, CheckpointError: as `checkpoints_to_try`.
        DamagedError: the description is damaged; without a `step`, all are.
    """
    paths = checkpoints_to_try(folder, step)
    if step is not None:
        return ChosenCheckpoint(folder, paths[0], read_metadata(paths[0]), by_step=True)
    return _newest_described(folder, paths, ())


def choose_older(damaged: ChosenCheckpoint, error: DamagedError) -> ChosenCheckpoint:
    """Chooses the next older checkpoint with an intact description.

    Raises:
        DamagedError: the same `error` where the step was asked for; or no other is intact.
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
    """Removes checkpoints, oldest first, and yields each removed path.

    Keeps the `last` newest (None: all), iterations divisible by `every`, and the best by validation. A checkpoint with
    missing or cut files is neither removed nor counted. One saved after skipped steps does not push out a sound one.
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
    # After skipped steps, weights may have gone bad before the first step that was not finite.
    sound = [path for path in newest_first if not found[path].skipped_steps]
    kept = {*newest_first[:last], *sound[:last]}
    for path, metadata in found.items():
        if metadata.iteration == best or (every and metadata.iteration % every == 0):
            kept.add(path)
    for path in found:
        if path not in kept:
            aside = path.with_name(f"{path.name}.removed.tmp")
            shutil.rmtree(aside, ignore_errors=True)
            # Half a checkpoint is never taken for one. After a kill, `clean` removes the rest by its ending.
            path.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
            yield path


def _best(folder: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(read_regular(folder / BEST))
    return None
