"""`metadata.json`: what a checkpoint says of itself, readable, and protected by a checksum over its own text."""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megasnn.checkpoint.errors import CheckpointError, DamagedError

METADATA = "metadata.json"
FORMAT = 2
_SERIAL = re.compile(rb'"serial": (\d+),')


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
        files: file name -> {"bytes": size, "crc32": eight hexadecimal digits}. `.metadata` has the checksums of blocks.
        versions: of the programs that wrote it.
        serial: counts the checkpoints saved in this folder, so that their order is known where a run went back.
        format: version of this description.
    """

    iteration: int
    consumed_samples: int
    config: dict[str, Any] | None
    layout: dict[str, Any] | None
    extra: dict[str, Any]
    optimizer: str | None
    tensors: dict[str, dict[str, Any]]
    files: dict[str, dict[str, Any]]
    versions: dict[str, str]
    serial: int = 1
    format: int = FORMAT


def to_text(metadata: Metadata) -> str:
    values = asdict(metadata)
    first = {name: values.pop(name) for name in ("format", "serial")}  # `serial_of` reads no further
    text = json.dumps(first | values, indent=2).removesuffix("\n}")
    return text + _ending(text.encode())


def _ending(covered: bytes) -> str:
    return f',\n  "crc32": "{zlib.crc32(covered):08x}"\n}}\n'


def read_metadata(path: Path) -> Metadata:
    """Reads `metadata.json` of one checkpoint (`.../iter_0000100`), and sees that its files are there.

    Raises:
        DamagedError: it is unreadable or altered, or a file is missing or of another size.
        CheckpointError: it is of another format.
    """
    file = path / METADATA
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DamagedError(f"cannot read {file}: {error}") from None
    length = len(_ending(b""))
    if content[-length:] != _ending(content[:-length]).encode():
        raise _unchecked(file, content)
    values = json.loads(content)
    if values["format"] != FORMAT:
        raise _other_format(file, values["format"])
    metadata = Metadata(**{field.name: values[field.name] for field in fields(Metadata)})
    if damaged := [
        problem for name, told in metadata.files.items() if (problem := _damage(path / name, told["bytes"]))
    ]:
        raise DamagedError(*damaged)
    return metadata


def _unchecked(file: Path, content: bytes) -> CheckpointError:
    """Without a valid checksum: of the first format, which had none, or altered."""
    try:
        values = json.loads(content)
    except ValueError:
        values = None
    if isinstance(values, dict) and "crc32" not in values and values.get("format") == 1:
        return _other_format(file, 1)
    return DamagedError(f"{file} is cut or was altered: its checksum differs")


def _other_format(file: Path, written: int) -> CheckpointError:
    return CheckpointError(f"{file} is of format {written}, this megasnn reads format {FORMAT}")


def _damage(file: Path, size: int) -> str | None:
    if not file.is_file():
        return f"{file} is missing"
    actual = file.stat().st_size
    return None if actual == size else f"{file} has {actual} bytes, was written with {size}"


def serial_of(path: Path) -> int | None:
    """`serial` of the checkpoint in this folder, from its first bytes, unchecked; None when not legible."""
    try:
        with open(path / METADATA, "rb") as file:
            found = _SERIAL.search(file.read(200))
    except OSError:
        return None
    return int(found[1]) if found else None
