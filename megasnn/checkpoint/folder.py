"""The folder of a run's checkpoints, in Megatron's shape; nothing here knows tensors.

    checkpoints/
        latest_checkpointed_iteration.txt      "200"
        iter_0000100/
        iter_0000200/
            metadata.json                      what it is, readable
            .metadata  __0_0.distcp ...        torch.distributed.checkpoint's files
        iter_0000300.tmp/                      being written, or left by a run that was killed: never loaded

A checkpoint is written aside, synced to disk, renamed, and only then named by the `latest` file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megasnn.checkpoint.errors import CheckpointError, NoCheckpointError

LATEST = "latest_checkpointed_iteration.txt"
METADATA = "metadata.json"
FORMAT = 1
_STEP_FOLDER = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True)
class Metadata:
    """What `metadata.json` says about a checkpoint.

    Attributes:
        iteration, consumed_samples: the progress of the run.
        config: what defines the model; None for a checkpoint of weights from elsewhere.
        layout: the process grid that wrote it; for the reader only, loading does not depend on it.
        extra: whatever the training loop keeps (schedule, data position, seed, ...).
        optimizer: class name of the optimizer whose state is inside; None without one.
        tensors: global name -> {"shape": [...], "dtype": "float32"}; the optimizer's are called
            `optimizer.<state>.<name of the parameter>`.
        files: file name -> {"bytes": size}.
        versions: of the programs that wrote it.
        format: version of this description.
    """

    iteration: int
    consumed_samples: int
    config: dict[str, Any] | None
    layout: dict[str, Any] | None
    extra: dict[str, Any]
    optimizer: str | None
    tensors: dict[str, dict[str, Any]]
    files: dict[str, dict[str, int]]
    versions: dict[str, str]
    format: int = FORMAT


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"iter_{step:07d}"


def list_checkpoints(folder: str | os.PathLike[str]) -> list[int]:
    """The iterations of all complete checkpoints in a folder, ascending; empty without such a folder."""
    found = (_STEP_FOLDER.fullmatch(path.parent.name) for path in Path(folder).glob(f"iter_*/{METADATA}"))
    return sorted(int(match[1]) for match in found if match)


def find_checkpoint(folder: Path, step: int | None) -> Path:
    """The folder of one checkpoint: of iteration `step`, or the latest.

    Raises:
        NoCheckpointError: there is none at all.
        CheckpointError: this one is not there, or `latest` cannot be followed; says which exist.
    """
    if not folder.is_dir():
        raise NoCheckpointError(f"there is no folder {folder} to load a checkpoint from; check --load")
    steps = list_checkpoints(folder)
    if step is None:
        step = _latest_step(folder, steps)
    elif step not in steps:
        raise CheckpointError(f"{folder} has no checkpoint of iteration {step} (--ckpt-step); {_there(steps)}")
    return step_folder(folder, step)


def _latest_step(folder: Path, steps: list[int]) -> int:
    latest = folder / LATEST
    try:
        text = latest.read_text().strip()
    except FileNotFoundError:
        if not steps:
            raise NoCheckpointError(f"{folder} holds no checkpoint (no {LATEST}); check --load") from None
        raise CheckpointError(f"{folder} has no {LATEST}; {_there(steps)}") from None
    if not text.isdecimal():
        raise CheckpointError(f"{latest} should hold an iteration, found {text[:40]!r}; {_there(steps)}")
    if int(text) not in steps:
        raise CheckpointError(f"{latest} names iteration {text}, which is not there; {_there(steps)}")
    return int(text)


def _there(steps: list[int]) -> str:
    if not steps:
        return "there is no complete checkpoint; check --load"
    return f"complete checkpoints: {', '.join(map(str, steps))}; choose one with --ckpt-step"


def read_metadata(path: Path) -> Metadata:
    """Reads `metadata.json` of one checkpoint (`.../iter_0000100`), and sees that its files are there.

    Raises:
        CheckpointError: it is unreadable or of another format, or a file is missing or of another size.
    """
    try:
        values = json.loads((path / METADATA).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path / METADATA}: {error}") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        written = values.get("format") if isinstance(values, dict) else None
        raise CheckpointError(f"{path / METADATA} is of format {written}, this megasnn reads format {FORMAT}")
    missing = {field.name for field in fields(Metadata)} - values.keys()
    if missing:
        raise CheckpointError(f"{path / METADATA} lacks {', '.join(sorted(missing))}")
    metadata = Metadata(**{field.name: values[field.name] for field in fields(Metadata)})
    damage = (_damage(path / name, told["bytes"]) for name, told in metadata.files.items())
    if damaged := [problem for problem in damage if problem]:
        raise CheckpointError(*damaged)
    return metadata


def _damage(file: Path, size: int) -> str | None:
    if not file.is_file():
        return f"{file} is missing"
    actual = file.stat().st_size
    return None if actual == size else f"{file} has {actual} bytes, was written with {size}"


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of this iteration into, until `commit`."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = _aside(folder, step)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    return aside


def commit(folder: Path, metadata: Metadata) -> Path:
    """Makes what was written since `begin` the checkpoint of its iteration and the latest, safely on disk."""
    step = metadata.iteration
    aside, final = _aside(folder, step), step_folder(folder, step)
    _write_synced(aside / METADATA, json.dumps(asdict(metadata), indent=2) + "\n")
    _sync(aside)
    replaced = folder / f"{final.name}.replaced.tmp"
    shutil.rmtree(replaced, ignore_errors=True)
    # A run that went back to an older checkpoint comes by here again; what it saves now counts. A power
    # cut between these two renames, and only there, leaves the step as `replaced`, to be renamed by hand.
    if final.exists():
        final.rename(replaced)
    aside.rename(final)
    _sync(folder)
    _write_synced(folder / f"{LATEST}.tmp", f"{step}\n")
    os.replace(folder / f"{LATEST}.tmp", folder / LATEST)
    _sync(folder)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def discard(folder: Path, step: int) -> None:
    """Removes what was written since `begin`."""
    shutil.rmtree(_aside(folder, step), ignore_errors=True)


def file_sizes(path: Path) -> dict[str, dict[str, int]]:
    return {file.name: {"bytes": file.stat().st_size} for file in sorted(path.iterdir())}


def _aside(folder: Path, step: int) -> Path:
    return folder / f"{step_folder(folder, step).name}.tmp"


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
