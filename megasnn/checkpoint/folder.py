"""The folder of a run's checkpoints, in Megatron's shape; nothing here knows tensors.

    checkpoints/
        latest_checkpointed_iteration.txt      "200"
        best_checkpointed_iteration.txt        "100": the best by validation, where a run keeps that
        iter_0000100/
        iter_0000200/
            metadata.json                      what it is, readable
            pieces.json                        where each piece of each tensor lies in the next
            __0_0.distcp ...                   torch.distributed.checkpoint's files of values
            .metadata                          torch's own description of them, which is written and not read
        iter_0000300.tmp/                      being written, or left by a run that was killed: never loaded

A checkpoint is written aside, synced to disk, renamed, and only then named by the `latest` file. What is removed is
renamed first, so that half of it is not taken for a checkpoint.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from megasnn.checkpoint.description import LAST_SERIAL, METADATA, Metadata, read_metadata, serial_of, to_text
from megasnn.files.described import DescriptionError, open_within
from megasnn.files.durable import sync, write_whole
from megasnn.files.locks import Outcome, try_lock
from megasnn.files.problems import CheckpointError, DamagedError

LATEST = "latest_checkpointed_iteration.txt"
BEST = "best_checkpointed_iteration.txt"
_STEP_FOLDER = re.compile(r"iter_([0-9]{7,18})(\.replaced\.tmp)?")
_ITERATION = re.compile(rb"[0-9]{1,18}")


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"iter_{step:07d}"


def checkpoints(folder: Path) -> dict[int, Path]:
    """All complete checkpoints in a folder by iteration, ascending; empty without such a folder.

    A link is none of them: what it leads to is not of this folder. A run that was killed while it replaced a checkpoint
    may have left only the old one, under the name it had aside.
    """
    found: dict[int, Path] = {}
    for path in sorted(folder.glob(f"iter_*/{METADATA}"), reverse=True):
        if (match := _STEP_FOLDER.fullmatch(path.parent.name)) and not path.parent.is_symlink():
            found[int(match[1])] = path.parent  # the plain name sorts first, so it comes last
    return dict(sorted(found.items()))


def step_of(path: Path) -> int | None:
    """The iteration of a folder that is a complete checkpoint itself; None where it is none."""
    match = _STEP_FOLDER.fullmatch(path.name)
    return int(match[1]) if match and (path / METADATA).is_file() else None


def aside_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of this iteration is written until it is complete."""
    return folder / f"{step_folder(folder, step).name}.tmp"


def list_checkpoints(folder: str | os.PathLike[str]) -> list[int]:
    """The iterations of all complete checkpoints in a folder, ascending; empty without such a folder."""
    return list(checkpoints(Path(folder)))


def read_named(folder: Path, file: str) -> int:
    """The iteration that `LATEST` or `BEST` names, whether it is there or not. Raises DescriptionError for none."""
    try:
        with open_within(folder, file) as stream:
            text = stream.read(64).strip()
    except OSError as error:
        raise DescriptionError(f"cannot read {folder / file}: {error}") from None
    if not _ITERATION.fullmatch(text):
        raise DescriptionError(f"{folder / file} should hold an iteration, found {text[:40]!r}")
    return int(text)


def named(folder: Path, file: str) -> int | None:
    """The iteration that `LATEST` or `BEST` names, whether it is there or not; None where it names none."""
    try:
        return read_named(folder, file)
    except DescriptionError:
        return None


def set_named(folder: Path, file: str, step: int) -> None:
    """Writes `LATEST` or `BEST`, as a whole or not at all, safely on disk."""
    write_whole(folder / file, f"{step}\n")
    sync(folder)


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of this iteration into, until `commit`. Raises CheckpointError where the
    folder around it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is a file" if folder.is_file() else error.strerror
        raise CheckpointError(f"cannot make {folder} a folder of checkpoints: {reason}; choose another") from None
    aside = aside_folder(folder, step)
    shutil.rmtree(aside, ignore_errors=True)
    if aside.is_symlink():
        aside.unlink()
    aside.mkdir()
    return aside


def commit(folder: Path, metadata: Metadata, best: bool = False) -> Path:
    """Makes what was written since `begin` the checkpoint of its iteration and the latest, safely on disk.

    Args:
        best: whether it is the best, too.
    """
    step = metadata.iteration
    aside, final = aside_folder(folder, step), step_folder(folder, step)
    metadata = replace(metadata, serial=min(1 + last_serial(folder), LAST_SERIAL))
    write_whole(aside / METADATA, to_text(metadata))
    read_metadata(aside)  # what could not be read is not saved
    sync(aside)
    replaced = folder / f"{final.name}.replaced.tmp"
    # A run that went back to an older checkpoint comes by here again; what it saves now counts.
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    aside.rename(final)
    sync(folder)
    set_named(folder, LATEST, step)
    if best:
        set_named(folder, BEST, step)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def last_serial(folder: Path) -> int:
    """`serial` of the checkpoint that was saved last; 0 when there is none."""
    serials = (serial_of(path) for path in checkpoints(folder).values())
    return max((serial for serial in serials if serial is not None), default=0)


def discard(folder: Path, step: int) -> None:
    """Removes what was written since `begin`."""
    shutil.rmtree(aside_folder(folder, step), ignore_errors=True)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Keeps a checkpoint from being removed while it is read, where the file system has locks. Raises DamagedError."""
    handle = hold(path)
    try:
        yield
    finally:
        os.close(handle)


def hold(path: Path) -> int:
    """A descriptor that keeps this checkpoint from being removed until it is closed. Raises DamagedError."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise DamagedError(f"cannot open {path}: {error}") from None
    _is_free(handle, shared=True)
    return handle


def remove(path: Path) -> bool:
    """Removes a checkpoint, unless a process is reading it; False then."""
    handle = os.open(path, os.O_RDONLY)
    try:
        if not _is_free(handle):
            return False
        aside = path.with_name(f"{path.name}.removed.tmp")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    finally:
        os.close(handle)
    shutil.rmtree(aside, ignore_errors=True)
    return True


def _is_free(handle: int, shared: bool = False) -> bool:
    """Locks a folder. False where another process has locked it; where folders cannot be locked, none has."""
    try:
        return try_lock(handle, shared) is not Outcome.HELD
    except OSError:
        return True


@dataclass(frozen=True)
class Retention:
    """Which checkpoints of a folder stay.

    Attributes:
        last: how many of those saved last stay; None keeps all.
        every: those of iterations divisible by this stay as well.
        others: checkpoints up to this serial are of another run, and stay.
    """

    last: int | None = None
    every: int | None = None
    others: int = 0


def superfluous(folder: Path, retention: Retention) -> list[Path]:
    """The checkpoints that may go, the oldest first.

    The best by validation stays, where the folder names one.
    Only complete ones count, and only they go: one with missing or cut files does not push out one that is intact.
    """
    if retention.last is None:
        return []
    serials = {step: serial for step, serial in _serials(folder) if serial > retention.others}
    oldest_first = sorted(serials, key=lambda step: (serials[step], step))
    found, best = checkpoints(folder), named(folder, BEST)
    return [
        found[step]
        for step in oldest_first[: -retention.last]
        if step != best and (retention.every is None or step % retention.every != 0)
    ]


def prune(folder: Path, retention: Retention) -> list[Path]:
    """Removes what is superfluous, except what is being read: that goes another time. Returns what was removed."""
    return [path for path in superfluous(folder, retention) if remove(path)]


def clean(folder: Path) -> None:
    """Removes what killed runs left half written. Only for the run that holds the folder's lock."""
    needed = set(checkpoints(folder).values())
    for path in folder.glob("iter_*.tmp"):
        if path not in needed:
            shutil.rmtree(path, ignore_errors=True)


def _serials(folder: Path) -> Iterator[tuple[int, int]]:
    for step, path in checkpoints(folder).items():
        try:
            yield step, read_metadata(path).serial
        except CheckpointError:
            continue
