"""The folder of a run's checkpoints, in Megatron's shape; nothing here knows tensors.

    checkpoints/
        latest_checkpointed_iteration.txt      "200"
        best_checkpointed_iteration.txt        "100": the best by validation, with --keep-best
        iter_0000100/
        iter_0000200/                          metadata.json and a safetensors file for each rank that writes
        iter_0000300.tmp/                      being written, or left by a run that was killed: never loaded

A checkpoint is written aside, synced to disk, renamed, and only then named by the `latest` file. A removed one is
renamed first, so that half of it is not taken for a checkpoint.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

from megasnn.checkpoint.format import METADATA, Metadata, read_metadata, size_problem, to_text
from megasnn.files import CheckpointError, NoCheckpointError, sync, write_whole

LATEST = "latest_checkpointed_iteration.txt"
BEST = "best_checkpointed_iteration.txt"
_STEP_FOLDER = re.compile(r"iter_([0-9]{7,18})(\.replaced\.tmp)?")


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"iter_{step:07d}"


def checkpoints(folder: Path) -> dict[int, Path]:
    """All complete checkpoints in a folder by iteration, ascending; empty without such a folder.

    A run that was killed while it replaced a checkpoint may have left only the old one, under the name it had aside.
    """
    found: dict[int, Path] = {}
    for path in sorted(folder.glob(f"iter_*/{METADATA}"), reverse=True):
        if match := _STEP_FOLDER.fullmatch(path.parent.name):
            found[int(match[1])] = path.parent  # the plain name sorts first, so it comes last
    return dict(sorted(found.items()))


def list_checkpoints(folder: str | os.PathLike[str]) -> list[int]:
    """Iterations of all complete checkpoints in a folder, ascending; empty without such a folder."""
    return list(checkpoints(Path(folder)))


def named(folder: Path, file: str) -> int | None:
    """Iteration that `LATEST` or `BEST` names, even if that checkpoint is missing; None where it names none."""
    try:
        text = (folder / file).read_bytes().strip()
    except OSError:
        return None
    return int(text) if re.fullmatch(rb"[0-9]{1,18}", text) else None


# --- writing


def require_empty(folder: Path) -> None:
    """Raises CheckpointError for a folder that holds checkpoints."""
    if there := list_checkpoints(folder):
        raise CheckpointError(f"{folder} holds checkpoints up to iteration {there[-1]}; give another --save")


def begin(folder: Path, step: int) -> Path:
    """Makes an empty folder to write the checkpoint of this iteration into, until `commit`. Raises CheckpointError
    where the folder around it cannot be made."""
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


def commit(folder: Path, metadata: Metadata, best: bool = False) -> Path:
    """Makes the files written since `begin` the checkpoint of their iteration and the latest (and `best`), on disk.

    Where a run went back to an older checkpoint, those in between are of the course that was given up: they get another
    name, and are not taken for this run's.
    """
    step = metadata.iteration
    aside, final = _aside(folder, step), step_folder(folder, step)
    write_whole(aside / METADATA, to_text(metadata))
    sync(aside)
    replaced = folder / f"{final.name}.replaced.tmp"
    latest = named(folder, LATEST)
    for other, path in checkpoints(folder).items():
        if latest is not None and latest < other < step:
            names = (path.with_name(f"{path.name}.given_up{number or ''}") for number in count())
            path.rename(next(name for name in names if not name.exists()))
    # A run that went back to an older checkpoint comes by here again; its own save counts now.
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    aside.rename(final)
    sync(folder)
    for file in (LATEST, BEST) if best else (LATEST,):
        write_whole(folder / file, f"{step}\n")
        sync(folder)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def go_back(folder: Path, step: int) -> None:
    """Makes the checkpoint of this iteration the latest: a run goes on from it, and gives up those after it."""
    write_whole(folder / LATEST, f"{step}\n")
    sync(folder)


def discard(folder: Path, step: int) -> None:
    """Removes files written since `begin`."""
    shutil.rmtree(_aside(folder, step), ignore_errors=True)


def clean(folder: Path) -> None:
    """Removes half-written checkpoints of killed runs. Only for the run that holds the folder's lock."""
    needed = set(checkpoints(folder).values())
    for path in folder.glob("iter_*.tmp"):
        if path not in needed:
            shutil.rmtree(path, ignore_errors=True)


# --- reading


def resolve(folder: Path, step: int | None) -> tuple[list[Path], list[str]]:
    """Checkpoints to try, in this order, and remarks on that order for the user.

    That is the checkpoint of iteration `step` alone, or of a folder that is one itself ("checkpoints/iter_0000100");
    or the latest, and after it those before it. Those of later iterations are of a course that was given up.

    Raises:
        NoCheckpointError: there is none at all.
        CheckpointError: the one of this iteration is not there; says which exist.
    """
    if not folder.is_dir():
        raise NoCheckpointError(f"there is no folder {folder} to load a checkpoint from; check its path (--load)")
    if (match := _STEP_FOLDER.fullmatch(folder.name)) and (folder / METADATA).is_file():
        if step not in (None, int(match[1])):
            raise CheckpointError(f"{folder} is the checkpoint of iteration {int(match[1])}, not of {step}")
        return [folder], []
    found = checkpoints(folder)
    if step is not None:
        if step not in found:
            there = ", ".join(map(str, found)) or "none"
            raise CheckpointError(f"{folder} has no checkpoint of iteration {step} (--ckpt-step); complete: {there}")
        return [found[step]], []
    if not found:
        kind = CheckpointError if (folder / LATEST).exists() else NoCheckpointError
        raise kind(f"{folder} holds no complete checkpoint; check its path (--load)")
    latest, descending = named(folder, LATEST), [*reversed(found)]
    order = [each for each in descending if latest is None or each <= latest] or descending
    if latest in found:
        return [found[each] for each in order], []
    names = "names no iteration" if latest is None else f"names iteration {latest}, which is not there"
    return [found[each] for each in order], [f"{folder / LATEST} {names}; taking the newest that is intact"]


def find_checkpoint(folder: Path) -> Path:
    """The first that `resolve` finds. Warns when `latest` is not right."""
    paths, remarks = resolve(folder, None)
    for remark in remarks:
        warnings.warn(remark, stacklevel=2)
    return paths[0]


def first_legible(folder: Path, step: int | None) -> Metadata | None:
    """Description of the first checkpoint to try, or of the next one that can be read; None when none can."""
    with suppress(CheckpointError):
        for path in resolve(folder, step)[0]:
            with suppress(CheckpointError):
                return read_metadata(path)
    return None


# --- retention


def prune(folder: Path, last: int | None, every: int | None = None) -> Iterator[Path]:
    """Removes checkpoints, the oldest first, and yields each that is gone.

    The last so many stay (all: None), those of iterations divisible by `every`, the best by validation, and those after
    the latest.
    One with missing or cut files neither goes nor counts. One that followed skipped steps does not push out one that
    did not: the weights may have gone bad before the first step that was not finite.
    """
    if last is None:
        return
    best, latest, found = named(folder, BEST), named(folder, LATEST), dict[Path, Metadata]()
    for step, path in checkpoints(folder).items():
        with suppress(CheckpointError):
            metadata = read_metadata(path)
            damaged = any(size_problem(path / name, saved) for name, saved in metadata.files.items())
            if latest is not None and step <= latest and not damaged:
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
