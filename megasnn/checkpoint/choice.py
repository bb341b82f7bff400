"""Which checkpoint of a folder to load, and which to try when that one is damaged."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megasnn.checkpoint.description import METADATA, Metadata, read_metadata, serial_of
from megasnn.checkpoint.folder import LATEST, checkpoints, read_named, step_of
from megasnn.files.described import DescriptionError
from megasnn.files.problems import CheckpointError, DamagedError, NoCheckpointError


@dataclass(frozen=True)
class Choice:
    """The checkpoints to try, in this order, and remarks on that order for the user."""

    paths: tuple[Path, ...]
    remarks: tuple[str, ...] = ()


def choose(folder: Path, step: int | None) -> Choice:
    """The checkpoint of iteration `step` alone, or of a folder that is one itself ("checkpoints/iter_0000100"); or the
    latest, and after it the others from the newest on.

    Newest is what was saved last. Where a run had gone back to an older checkpoint, those of a later iteration that
    were saved before are of a course that was given up: they are left out.

    Raises:
        NoCheckpointError: there is none at all.
        CheckpointError: the one of this iteration is not there; says which exist.
    """
    if not folder.is_dir():
        raise NoCheckpointError(f"there is no folder {folder} to load a checkpoint from; check its path (--load)")
    itself = step_of(folder)
    if itself is not None and step not in (None, itself):
        raise CheckpointError(f"{folder} is the checkpoint of iteration {itself}, not of {step} (--ckpt-step)")
    if itself is not None:
        return Choice((folder,))
    found = checkpoints(folder)
    if step is not None and step not in found:
        raise CheckpointError(f"{folder} has no checkpoint of iteration {step} (--ckpt-step); {_there(found)}")
    if step is not None:
        return Choice((found[step],))
    if not found and not (folder / LATEST).exists() and not _links(folder):
        raise NoCheckpointError(f"{folder} holds no checkpoint (no {LATEST}); check its path (--load)")
    if not found:
        raise CheckpointError(f"{folder} has no complete checkpoint; check its path (--load)", *_links(folder))
    return _latest_first(folder, found)


def find_checkpoint(folder: Path, step: int | None) -> Path:
    """The folder of one checkpoint: of iteration `step`, or the latest; warns when `latest` is not right.

    Raises as `choose`, and DamagedError when none is legible.
    """
    choice = choose(folder, step)
    if not choice.paths:
        raise DamagedError(*choice.remarks)
    for remark in choice.remarks:
        warnings.warn(remark, stacklevel=2)
    return choice.paths[0]


def first_legible(folder: Path, step: int | None) -> Metadata | None:
    """What the first checkpoint to try says of itself, or the next one that can be read; None when none can."""
    with suppress(CheckpointError):
        for path in choose(folder, step).paths:
            with suppress(CheckpointError):
                return read_metadata(path)
    return None


def _latest_first(folder: Path, found: dict[int, Path]) -> Choice:
    serials = {step: serial_of(path) for step, path in found.items()}
    remarks = [f"{found[step] / METADATA} is not legible" for step, serial in serials.items() if serial is None]
    remarks += _links(folder)
    newest = _not_given_up({step: serial for step, serial in serials.items() if serial is not None})
    named, problem = _named(folder / LATEST, found)
    if problem:
        remarks.append(f"{problem}; taking the newest that is intact")
    elif newest and named != newest[0] and serials[named] is not None:
        remarks.append(
            f"{folder / LATEST} names iteration {named}, though iteration {newest[0]} was saved later (--ckpt-step "
            f"{newest[0]} takes that one)"
        )
    order = ([] if problem else [named]) + [step for step in newest if problem or step != named]
    return Choice(tuple(found[step] for step in order), tuple(remarks))


def _not_given_up(serials: dict[int, int]) -> list[int]:
    """Iterations from the newest on, each before the one that was saved after it.

    Of equal serials, which only an altered description leads to, the later iteration counts as the newer.
    """
    kept: list[int] = []
    for step in sorted(serials, key=lambda step: (serials[step], step), reverse=True):
        if not kept or step < kept[-1]:
            kept.append(step)
    return kept


def _named(latest: Path, found: Iterable[int]) -> tuple[int, str]:
    """The iteration that `latest` names, and what is wrong with it ("" when nothing is)."""
    try:
        step = read_named(latest.parent, LATEST)
    except DescriptionError as error:
        return -1, str(error)
    return step, "" if step in found else f"{latest} names iteration {step}, which is not there"


def _links(folder: Path) -> list[str]:
    links = (path for path in sorted(folder.glob("iter_*")) if path.is_symlink())
    return [f"{path} is a link and is passed over; to load what it leads to, name that itself" for path in links]


def _there(steps: Iterable[int]) -> str:
    if not (there := ", ".join(map(str, steps))):
        return "there is no complete checkpoint"
    return f"complete checkpoints: {there}; choose one with --ckpt-step"
