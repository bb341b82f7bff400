"""`metadata.json`: what a checkpoint says of itself, readable, and protected by a checksum over its own text."""

from __future__ import annotations

import json
import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, with_config

from megasnn.files.described import (
    STRICT,
    Count,
    Crc32,
    DescriptionError,
    DtypeName,
    FreeForm,
    PlainName,
    Shape,
    TensorName,
    described,
    open_within,
    read_bounded,
)
from megasnn.files.problems import CheckpointError, DamagedError

METADATA = "metadata.json"
FORMAT = 3
_READ = (2, FORMAT)
LAST_SERIAL = 10**15
PREFIX = "optimizer."
"""Names of an optimizer's state begin so; the kind of state and the parameter's name follow."""
AVERAGE = "ema."
"""Names of a running average of the model's tensors begin so; the tensor's name follows."""
BESIDE = (PREFIX, AVERAGE)
"""How names begin of what is no tensor of the model itself."""
_FORMAT = re.compile(rb'\A{\s*"format": ([0-9]{1,9}),')
_ITERATION = re.compile(r"iter_([0-9]{7,18})(?![0-9])")
_SERIAL = re.compile(rb'"serial": ([0-9]{1,16}),')


def _tensor_name(name: str) -> str:
    kind, _, parameter = name.removeprefix(PREFIX).partition(".")
    if name.startswith(PREFIX) and not (kind and parameter):
        raise ValueError("should name a kind of state and a parameter")
    return name


Progressed = Annotated[int, Field(ge=0, le=10**15)]
_MODEL_NAME = "[A-Za-z][A-Za-z0-9_]{0,63}"
ModelName = Annotated[str, Field(pattern=f"^{_MODEL_NAME}$")]
GlobalName = Annotated[TensorName, AfterValidator(_tensor_name)]


@with_config(STRICT)
@dataclass(frozen=True)
class TensorFacts:
    """What `metadata.json` says about a tensor."""

    shape: Shape
    dtype: DtypeName


@with_config(STRICT)
@dataclass(frozen=True)
class FileFacts:
    """What `metadata.json` says about a file."""

    bytes: Count
    crc32: Crc32


@with_config(STRICT)
@dataclass(frozen=True)
class Metadata:
    """What `metadata.json` says about a checkpoint.

    Attributes:
        iteration, consumed_samples: the progress of the run.
        config: what defines the model; None for a checkpoint of weights from elsewhere.
        layout: the process grid that wrote it; for the reader only, loading does not depend on it.
        extra: whatever the training loop keeps (schedule, data position, seed, ...).
        optimizer: class name of the optimizer whose state is inside; None without one.
        tensors: by global name; the optimizer's are called `optimizer.<state>.<name of the parameter>`.
        files: by name; where the tensors lie in them, and the checksums of blocks, is in `pieces.json`.
        versions: of the programs that wrote it.
        model: name of the model in the table of models; None where the writer did not know it, and in checkpoints from
            before it was kept.
        serial: counts the checkpoints saved in this folder, so that their order is known where a run went back.
        format: version of this description. Format 2 has no `pieces.json`, but torch's `.metadata` alone.
    """

    iteration: Progressed
    consumed_samples: Progressed
    config: FreeForm | None
    layout: FreeForm | None
    extra: FreeForm
    optimizer: str | None
    tensors: dict[GlobalName, TensorFacts]
    files: dict[PlainName, FileFacts]
    versions: dict[str, str]
    model: ModelName | None = None
    serial: Annotated[int, Field(ge=0, le=LAST_SERIAL)] = 1
    format: Annotated[int, Field(ge=_READ[0], le=FORMAT)] = FORMAT

    @property
    def has_pieces(self) -> bool:
        return self.format > 2


def require_model_name(name: str | None) -> None:
    """Raises CheckpointError for a name that could be written but not read."""
    if name is not None and not re.fullmatch(_MODEL_NAME, name):
        raise CheckpointError(f"model {name!r}: should be a letter, and up to 63 letters, digits and _ behind it")


def to_text(metadata: Metadata) -> str:
    values = dict(vars(metadata))
    first = {name: values.pop(name) for name in ("format", "serial", "model")}  # `serial_of` reads no further
    text = json.dumps(first | values, indent=2, default=vars).removesuffix("\n}")
    return text + _ending(text.encode())


def _ending(covered: bytes) -> str:
    return f',\n  "crc32": "{zlib.crc32(covered):08x}"\n}}\n'


def read_metadata(path: Path, part: int = 0, parts: int = 1) -> Metadata:
    """Reads `metadata.json` of one checkpoint (`.../iter_0000100`), and sees that its files are there.

    Args:
        part: of so many parts the one whose files are looked at: ranks share them out, as all of them together would
            open the square of their number.
    Raises:
        DamagedError: it is unreadable, altered or not possible, or a file is missing, a link, or of another size.
        CheckpointError: it is of another format.
    """
    file = path / METADATA
    try:
        with open_within(path, METADATA) as stream:
            content = read_bounded(stream, file)
        covered = content[: -len(_ending(b""))]
        if content != covered + _ending(covered).encode():
            raise _unchecked(file, content)
        if (found := _FORMAT.search(content)) and int(found[1]) not in _READ:
            raise _other_format(file, int(found[1]))
        metadata = described(Metadata, covered + b"}", file)
    except OSError as error:
        raise DamagedError(f"cannot read {file}: {error}") from None
    except DescriptionError as error:
        raise DamagedError(*error.args) from None
    if (named := _ITERATION.match(path.name)) and int(named[1]) != metadata.iteration:
        raise DamagedError(f"{file}: iteration: the folder is called {path.name}, found {metadata.iteration}")
    mine = list(metadata.files.items())[part::parts]
    if damaged := [problem for name, told in mine if (problem := _damage(path, name, told.bytes))]:
        raise DamagedError(*damaged)
    return metadata


def _unchecked(file: Path, content: bytes) -> CheckpointError:
    """Without a valid checksum: of the first format, which had none, or altered."""
    if re.search(rb'"format": 1[,\s]', content) and not re.search(rb'"crc32": "\w*"\n}\n\Z', content):
        return _other_format(file, 1)
    return DamagedError(f"{file} is cut or was altered: its checksum differs")


def _other_format(file: Path, written: int) -> CheckpointError:
    formats = " and ".join(map(str, _READ))
    return CheckpointError(f"{file} is of format {written}, this megasnn reads formats {formats}")


def _damage(path: Path, name: str, size: int) -> str | None:
    try:
        with open_within(path, name) as stream:
            actual = os.fstat(stream.fileno()).st_size
    except FileNotFoundError:
        return f"{path / name} is missing"
    except OSError as error:
        return f"cannot read {path / name}: {error}"
    return None if actual == size else f"{path / name} has {actual} bytes, was written with {size}"


def serial_of(path: Path) -> int | None:
    """`serial` of the checkpoint in this folder, from its first bytes, unchecked; None when not legible."""
    try:
        with open_within(path, METADATA) as stream:
            found = _SERIAL.search(stream.read(200))
    except OSError:
        return None
    return int(found[1]) if found and int(found[1]) <= LAST_SERIAL else None
