"""`metadata.json`: what a checkpoint says of itself, and where each part of each tensor lies.

A tensor is saved as boxes (offsets and sizes, an entry for each dimension), each under a name of its own in a
safetensors file. The description ends with a checksum of its own text, and has one for each file.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config

from megasnn.files.problems import CheckpointError, DamagedError, problem_list

METADATA = "metadata.json"
FORMAT = 4
OPTIMIZER = "optimizer."
"""Names of an optimizer's state begin so; the kind of state and the parameter's name follow."""
AVERAGE = "ema."
"""Names of a running average of the model's tensors begin so; the tensor's name follows."""
BESIDE = (OPTIMIZER, AVERAGE)
"""Beginnings of names of what is no tensor of the model itself."""
DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
"""Types of elements by their names in torch: the name in safetensors, and bytes."""
_FORMAT = re.compile(rb'\A{\s*"format": (\d{1,9}),')
_SERIAL = re.compile(rb'\n  "serial": (\d{1,18}),')
_ITERATION = re.compile(r"iter_(\d{7,18})(?!\d)")
_STRICT = with_config(ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))


def _known_dtype(name: str) -> str:
    if name not in DTYPES:
        raise ValueError(f"should be one of {', '.join(DTYPES)}")
    return name


Count = Annotated[int, Field(ge=0, le=1 << 62)]
Numbers = tuple[Count, ...]
FileName = Annotated[str, Field(pattern=r"^\w+\.safetensors$")]
Dtype = Annotated[str, AfterValidator(_known_dtype)]
Json = dict[str, Any]


@_STRICT
@dataclass(frozen=True)
class Box:
    """A part of a tensor, and where it lies: `name` in `file`. The same box in another file is a copy."""

    file: FileName
    name: str
    offsets: Numbers
    sizes: Numbers


@_STRICT
@dataclass(frozen=True)
class SavedTensor:
    """A global tensor and the boxes that it was saved in."""

    shape: Numbers
    dtype: Dtype
    boxes: tuple[Box, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype][1]


@_STRICT
@dataclass(frozen=True)
class SavedFile:
    """The size of a file, and the CRC-32 of all of it."""

    bytes: Count
    crc32: Annotated[str, Field(pattern="^[0-9a-f]{8}$")]


@_STRICT
@dataclass(frozen=True)
class Progress:
    """What a run saves beside its tensors.

    Attributes:
        iteration, consumed_samples: how far the run is.
        model: its name in the registry of models; None where it is not known.
        config: what defines the model, {"model": {...}, "neuron": {...}}; None for weights from elsewhere.
        layout: the process grid, for the reader only: loading does not depend on it.
        extra: whatever the training loop keeps (recipe, place in the data, seed, ...).
        skipped_steps: steps since the save before that were not finite and changed nothing.
    """

    iteration: Count = 0
    consumed_samples: Count = 0
    model: str | None = None
    config: Json | None = None
    layout: Json | None = None
    extra: Json = field(default_factory=dict)
    skipped_steps: Count = 0


@_STRICT
@dataclass(frozen=True)
class Metadata(Progress):
    """All that `metadata.json` says.

    Attributes:
        optimizer: class name of the optimizer whose state is inside; None without one.
        versions: of the programs that wrote it.
        serial: counts the checkpoints saved in a folder, so that their order is known where a run went back.
        tensors: by global name; an optimizer's are called `optimizer.<state>.<name of the parameter>`.
        files: by name.
    """

    optimizer: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    serial: Count = 0
    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    files: dict[FileName, SavedFile] = field(default_factory=dict)


_READER = TypeAdapter(Metadata)


def to_text(metadata: Metadata) -> str:
    """The text of `metadata.json`: a line for each field, tensor and file, and the checksum of the text as the last."""
    values = dict(vars(metadata))
    first = {"format": FORMAT, "serial": values.pop("serial")}  # `serial_of` reads no further
    last = {name: values.pop(name) for name in ("tensors", "files")}
    lines = [f'  "{name}": {_dumped(value)}' for name, value in (first | values).items()]
    for name, table in last.items():
        rows = (f"    {json.dumps(key)}: {_dumped(value)}" for key, value in table.items())
        lines.append(f'  "{name}": {{\n' + ",\n".join(rows) + "\n  }")
    text = "{\n" + ",\n".join(lines)
    return text + _ending(text.encode())


def _dumped(value: Any) -> str:
    return json.dumps(value, default=vars, allow_nan=False)


def _ending(text: bytes) -> str:
    return f',\n  "crc32": "{zlib.crc32(text):08x}"\n}}\n'


def read_metadata(path: Path) -> Metadata:
    """Reads the description of one checkpoint (`.../iter_0000100`); its files are not looked at.

    Raises:
        DamagedError: it is unreadable, was altered, or cannot be (names the field).
        CheckpointError: it is of another format.
    """
    file = path / METADATA
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DamagedError(f"cannot read {file}: {error.strerror}") from None
    if (found := _FORMAT.match(content)) and int(found[1]) != FORMAT:
        raise CheckpointError(f"{file} is of format {int(found[1])}, this megasnn reads format {FORMAT}")
    text = content[: -len(_ending(b""))]
    if content != text + _ending(text).encode():
        raise DamagedError(f"{file} is cut or was altered: its checksum differs")
    try:
        metadata = _READER.validate_json(re.sub(rb'"format": \d+,', b"", text, count=1) + b"}")
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise DamagedError(f"{file}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None
    problems = list(_problems(metadata))
    if (named := _ITERATION.match(path.name)) and int(named[1]) != metadata.iteration:
        problems.append(f"the folder is called {path.name}, and iteration is {metadata.iteration}")
    if problems:
        raise problem_list(f"{file} describes what cannot be:", problems, DamagedError)
    return metadata


def serial_of(path: Path) -> int | None:
    """`serial` of the checkpoint in this folder, from its first bytes, unchecked; None when not legible."""
    try:
        with open(path / METADATA, "rb") as stream:
            found = _SERIAL.search(stream.read(100))
    except OSError:
        return None
    return int(found[1]) if found else None


def size_problem(path: Path, told: SavedFile) -> str | None:
    """Says that a file is missing or of another size than it was written with; its content is not read."""
    try:
        size = os.stat(path).st_size
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"
    return None if size == told.bytes else f"{path} is cut or was altered: {size} bytes, {told.bytes} were written"


def _problems(metadata: Metadata) -> Iterator[str]:
    """Boxes that are in no file, or do not make up their tensor; files that are too small for their boxes."""
    needed: dict[str, int] = defaultdict(int)
    for name, tensor in metadata.tensors.items():
        for box in tensor.boxes:
            needed[box.file] += prod(box.sizes) * DTYPES[tensor.dtype][1]
        if not covers_once(tensor.shape, {(box.offsets, box.sizes) for box in tensor.boxes}):
            yield f"{name}: its boxes do not hold each element of its shape {list(tensor.shape)} once"
    for file, size in needed.items():
        if file not in metadata.files or metadata.files[file].bytes < size:
            yield f"{file}: {size} bytes should lie in it, which it does not have"


def covers_once(shape: Sequence[int], boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """True when boxes (offsets, sizes) hold each element of a shape exactly once.

    Sweeps along the first dimension; between two edges, the boxes that lie there have to cover the other dimensions.
    """
    filled = [(offsets, sizes) for offsets, sizes in boxes if all(sizes)]
    if any(len(offsets) != len(shape) or len(sizes) != len(shape) for offsets, sizes in filled):
        return False
    if not all(shape) or len(filled) < 2:
        whole = [((0,) * len(shape), tuple(shape))] * all(shape)
        return [(tuple(offsets), tuple(sizes)) for offsets, sizes in filled] == whole
    if not shape:
        return False
    starting = defaultdict(list)
    for offsets, sizes in filled:
        starting[offsets[0]].append((offsets, sizes))
    edges = sorted({0, shape[0], *starting, *(offsets[0] + sizes[0] for offsets, sizes in filled)})
    if edges[-1] > shape[0]:
        return False
    here: list[tuple[Sequence[int], Sequence[int]]] = []
    for edge in edges[:-1]:
        here = [(offsets, sizes) for offsets, sizes in here if offsets[0] + sizes[0] > edge] + starting[edge]
        if not covers_once(shape[1:], [(offsets[1:], sizes[1:]) for offsets, sizes in here]):
            return False
    return True
