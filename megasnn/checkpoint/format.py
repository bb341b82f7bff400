"""`metadata.json`: progress of the run, and where each box of each tensor lies.

A tensor is saved as boxes (offsets and sizes, an entry for each dimension), each under a name of its own in a
safetensors file. The last line of the text is a checksum of what is before it; each file has one as well.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, with_config

from megasnn.common.files import (
    STRICT,
    DamagedError,
    DescriptionError,
    StoredCount,
    described,
    raise_problems,
    read_regular,
)

METADATA = "metadata.json"
STEP_FOLDER = re.compile(r"iter_([0-9]{7,18})")
"""Name of a checkpoint's folder in the folder of its run: the iteration."""
OPTIMIZER = "optimizer."
"""Names of an optimizer's state begin so; the kind of state and the parameter's name follow."""
AVERAGE = "ema."
"""Names of a running average of the model's tensors begin so; the tensor's name follows."""
AVERAGED_STEPS = "averaged_steps"
"""Under which a checkpoint keeps how many steps its average has followed."""
BESIDE = (OPTIMIZER, AVERAGE)
"""Beginnings of names of what is no tensor of the model itself."""
DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
"""Types of elements by their names in torch: the name in safetensors, and bytes."""


StoredCounts = tuple[StoredCount, ...]
SafetensorsName = Annotated[str, Field(pattern=r"^\w+\.safetensors$")]
Dtype = Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]


@with_config(STRICT)
@dataclass(frozen=True)
class Box:
    """Part of a tensor: `name` in `file`. The same box in another file is a copy."""

    file: SafetensorsName
    name: str
    offsets: StoredCounts
    sizes: StoredCounts


@with_config(STRICT)
@dataclass(frozen=True)
class SavedTensor:
    """A global tensor and the boxes that it was saved in."""

    shape: StoredCounts
    dtype: Dtype
    boxes: tuple[Box, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype][1]


@with_config(STRICT)
@dataclass(frozen=True)
class SavedFile:
    """Size of a file, and the CRC-32 of all of it."""

    bytes: StoredCount
    crc32: Annotated[str, Field(pattern="^[0-9a-f]{8}$")]


@with_config(STRICT)
@dataclass(frozen=True)
class Progress:
    """State of a run that is no tensor.

    Attributes:
        iteration, consumed_samples: how far the run is.
        model: its name in the registry of models; None where it is not known.
        config: what defines the model, {"model": {...}, "neuron": {...}}; None for weights from elsewhere.
        layout: the process grid, for the reader only: loading does not depend on it.
        extra: whatever the training loop keeps (recipe, place in the data, seed, ...).
        skipped_steps: steps since the save before that were not finite and changed nothing.
    """

    iteration: StoredCount = 0
    consumed_samples: StoredCount = 0
    model: str | None = None
    config: dict[str, dict[str, Any]] | None = None
    layout: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    skipped_steps: StoredCount = 0


@with_config(STRICT)
@dataclass(frozen=True)
class Metadata(Progress):
    """Content of `metadata.json`.

    Attributes:
        optimizer: class name of the optimizer whose state is inside; None without one.
        versions: of the programs that wrote it.
        tensors: by global name; an optimizer's are called `optimizer.<state>.<name of the parameter>`.
        files: by name.
        format: number of this shape of the file.
    """

    optimizer: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    files: dict[SafetensorsName, SavedFile] = field(default_factory=dict)
    format: Literal[5] = 5


def to_text(metadata: Metadata) -> str:
    """Text of `metadata.json`, with the checksum as the last line. Raises TypeError, ValueError for what JSON lacks."""
    text = json.dumps(metadata, default=_fields, allow_nan=False)[:-1]
    return text + _ending(text.encode())


def _fields(value: object) -> dict[str, Any]:
    if not is_dataclass(value):
        raise TypeError(f"JSON has no {type(value).__name__}: {value!r}")
    return vars(value)


def _ending(text: bytes) -> str:
    return f',\n  "crc32": "{zlib.crc32(text):08x}"\n}}\n'


def read_metadata(path: Path) -> Metadata:
    """Reads the description of one checkpoint (`.../iter_0000100`); its files are not looked at.

    Raises:
        DamagedError: it is unreadable, was altered, of another format, its files cannot hold its tensors, or it is of
            another iteration than the folder's name says.
    """
    file = path / METADATA
    try:
        content = read_regular(file)
    except OSError as error:
        raise DamagedError(f"cannot read {file}: {error.strerror}") from None
    text = content[: -len(_ending(b""))]
    if content != text + _ending(text).encode():
        raise DamagedError(f"{file} is cut or was altered: its checksum differs")
    try:
        metadata = described(Metadata, text + b"}", file)
    except DescriptionError as error:
        raise DamagedError(str(error)) from None
    named = STEP_FOLDER.fullmatch(path.name)
    if named is not None and int(named[1]) != metadata.iteration:
        raise DamagedError(
            f"{path} holds the checkpoint of iteration {metadata.iteration}: it was renamed or copied; give it back "
            f"its name, iter_{metadata.iteration:07d}, or one that does not begin with iter_"
        )
    wrong = [*_file_problems(metadata)] or [
        f"{name}: {problem}" for name, saved in metadata.tensors.items() if (problem := uncovered(saved)) is not None
    ]
    raise_problems(f"{file} is no description of its files:", wrong, DamagedError)
    return metadata


def _file_problems(metadata: Metadata) -> Iterator[str]:
    """One line for each file that is not listed, and for each that is smaller than the tensors in it."""
    needed = Counter[str]()
    for saved in metadata.tensors.values():
        for box in saved.boxes:
            needed[box.file] += prod(box.sizes) * DTYPES[saved.dtype][1]
    for file, size in needed.items():
        if file not in metadata.files:
            yield f"{file}: not among the files, so that nothing checks it"
        elif size > metadata.files[file].bytes:
            yield f"{file}: its tensors take {size} bytes, and it has {metadata.files[file].bytes}"


def uncovered(saved: SavedTensor) -> str | None:
    """Says that boxes do not hold each element of their tensor once; None where they do. Copies count once."""
    held = {(box.offsets, box.sizes) for box in saved.boxes}
    elements = sum(prod(sizes) for _, sizes in held)
    if elements == prod(saved.shape) and covers_once(saved.shape, held):
        return None
    return f"its boxes hold {elements} elements of {prod(saved.shape)}, or some twice"


def size_problem(path: Path, saved: SavedFile) -> str | None:
    """Names a file that is missing or of another size than it was written with; its content is not read."""
    try:
        size = os.stat(path).st_size
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"
    return None if size == saved.bytes else f"{path} is cut or was altered: {size} bytes, {saved.bytes} were written"


def config_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """One line for each field whose value differs, with both values, as `neuron.tau`."""
    before, after = (
        {f"{part}.{each}": value for part, values in config.items() for each, value in values.items()}
        for config in (saved, json.loads(json.dumps(now)))
    )
    for name in sorted(before.keys() | after.keys()):
        if (name in before) != (name in after) or before.get(name) != after.get(name):
            old, new = (reprlib.repr(values[name]) if name in values else "absent" for values in (before, after))
            yield f"{name}: saved {old}, now {new}"


def covers_once(shape: Sequence[int], boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """True when boxes (offsets, sizes) hold each element of a shape exactly once.

    Counts on a grid whose lines are the edges of the boxes: all that is between two lines is held equally often.
    """
    boxes = list(boxes)
    if boxes == [((0,) * len(shape), tuple(shape))]:  # nearly always
        return True
    if any(len(offsets) != len(shape) or len(sizes) != len(shape) for offsets, sizes in boxes):
        return False
    filled = [(offsets, sizes) for offsets, sizes in boxes if all(sizes)]
    spans = [[(offset, offset + size) for offset, size in zip(*box, strict=True)] for box in filled]
    if any(last > length for box in spans for (_, last), length in zip(box, shape, strict=True)):
        return False
    edges = [sorted({0, length, *(edge for box in spans for edge in box[dim])}) for dim, length in enumerate(shape)]
    held = np.zeros([len(lines) - 1 for lines in edges], dtype=np.int32)
    for box in spans:
        at = (slice(bisect_left(lines, a), bisect_left(lines, b)) for (a, b), lines in zip(box, edges, strict=True))
        held[tuple(at)] += 1
    return bool((held == 1).all())
