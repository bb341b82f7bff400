"""`metadata.json`: a run's progress, and each tensor box's file.

Boxes have offsets and sizes, one number per dimension, and a name in a safetensors file. The text's last line is a
checksum over the lines before it. Each file has a checksum as well.
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
from typing import Annotated, Any, Literal, TypeVar

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

_T = TypeVar("_T")
METADATA = "metadata.json"
STEP_FOLDER = re.compile(r"iter_([0-9]{7,18})")
"""Name of a checkpoint's folder, with its iteration."""
OPTIMIZER = "optimizer."
"""Prefix of optimizer state; the kind of state and the parameter's name follow."""
AVERAGE = "ema."
"""Prefix of the moving average of the model's tensors; the tensor's name follows."""
AVERAGED_STEPS = "averaged_steps"
"""Entry of `Progress.extra`: number of steps in the moving average."""
BESIDE = (OPTIMIZER, AVERAGE)
"""Prefixes of tensors beside the model's own."""
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
"""Element types by their torch names: the name in safetensors, and bytes."""
StoredCounts = tuple[StoredCount, ...]
SafetensorsName = Annotated[str, Field(pattern=r"^\w+\.safetensors$")]
Dtype = Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]


@with_config(STRICT)
@dataclass(frozen=True)
class Box:
    """Part of a tensor, under `name` in `file`. An equal box in another file is a copy."""

    file: SafetensorsName
    name: str
    offsets: StoredCounts
    sizes: StoredCounts


@with_config(STRICT)
@dataclass(frozen=True)
class SavedTensor:
    """A global tensor."""

    shape: StoredCounts
    dtype: Dtype
    boxes: tuple[Box, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype][1]


@with_config(STRICT)
@dataclass(frozen=True)
class SavedFile:
    """Bytes and CRC-32."""

    bytes: StoredCount
    crc32: Annotated[str, Field(pattern="^[0-9a-f]{8}$")]


@with_config(STRICT)
@dataclass(frozen=True)
class Progress:
    """A run's state beside its tensors.

    Attributes:
        iteration, consumed_samples: completed steps, and their training samples.
        config: dimensions and neuron, {"model": {...}, "neuron": {...}}; None for another program's weights.
        layout: process grid, for people only: loading does not depend on it.
        extra: the training loop's entries (recipe, data position, ...).
        skipped_steps: not finite, so without effect, since the previous save.
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
        optimizer: class name; None without saved state.
        tensors: by global name; optimizer state is named `optimizer.<state>.<parameter>`.
    """

    optimizer: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    files: dict[SafetensorsName, SavedFile] = field(default_factory=dict)
    format: Literal[5] = 5


def own_names(names: Iterable[str]) -> list[str]:
    """Names of the model's own tensors, without optimizer state and averages."""
    return [name for name in names if not name.startswith(BESIDE)]


def averages_of(tensors: Mapping[str, _T]) -> dict[str, _T]:
    """Averages under the names of the model's own tensors; empty for a run without --ema-decay."""
    return {name.removeprefix(AVERAGE): value for name, value in tensors.items() if name.startswith(AVERAGE)}


def to_text(metadata: Metadata) -> str:
    """Text with its checksum. Raises TypeError or ValueError for a value that JSON lacks."""
    # Without the closing brace, which follows the checksum.
    text = json.dumps(metadata, default=_fields, allow_nan=False)[:-1]
    return text + _ending(text.encode())


def _fields(value: object) -> dict[str, Any]:
    if not is_dataclass(value):
        raise TypeError(f"JSON has no {type(value).__name__}: {value!r}")
    return vars(value)


def _ending(text: bytes) -> str:
    return f',\n  "crc32": "{zlib.crc32(text):08x}"\n}}\n'


def read_metadata(path: Path) -> Metadata:
    """Reads one checkpoint's description (`.../iter_0000100`) alone.

    Raises:
        DamagedError: it is unreadable, altered, or in another format; its files cannot hold its tensors; or its
            iteration differs from the folder's name.
    """
    file = path / METADATA
    try:
        content = read_regular(file)
    except OSError as error:
        raise DamagedError(f"cannot read {file}: {error.strerror}") from None
    # Every ending has the same length: the checksum has 8 digits.
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
    title = f"{file} is no description of its files:"
    raise_problems(title, _file_problems(metadata), DamagedError)
    raise_problems(title, _tensor_problems(metadata), DamagedError)
    return metadata


def _file_problems(metadata: Metadata) -> Iterator[str]:
    needed = Counter[str]()
    for saved in metadata.tensors.values():
        for box in saved.boxes:
            needed[box.file] += prod(box.sizes) * DTYPES[saved.dtype][1]
    for file, size in needed.items():
        if file not in metadata.files:
            yield f"{file}: not among the files, so that nothing checks it"
        elif size > metadata.files[file].bytes:
            yield f"{file}: its tensors take {size} bytes, and it has {metadata.files[file].bytes}"


def _tensor_problems(metadata: Metadata) -> Iterator[str]:
    for name, saved in metadata.tensors.items():
        problem = uncovered(saved)
        if problem is not None:
            yield f"{name}: {problem}"


def uncovered(saved: SavedTensor) -> str | None:
    """Problem if boxes do not hold each element once, or None. Copies count once."""
    boxes = {(box.offsets, box.sizes) for box in saved.boxes}
    elements = sum(prod(sizes) for _, sizes in boxes)
    if elements == prod(saved.shape) and covers_once(saved.shape, boxes):
        return None
    return f"its boxes hold {elements} elements of {prod(saved.shape)}, or some twice"


def covers_once(shape: Sequence[int], boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether boxes (offsets, sizes) hold each element exactly once."""
    boxes = list(boxes)
    # Nearly every tensor is one box, and needs no grid.
    if boxes == [((0,) * len(shape), tuple(shape))]:
        return True
    spans: list[tuple[Sequence[int], Sequence[int]]] = []
    edges = [{0, length} for length in shape]
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return False
        if not all(sizes):  # an empty box
            continue
        ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        if any(end > length for end, length in zip(ends, shape, strict=True)):
            return False
        spans.append((offsets, ends))
        for dim, lines in enumerate(edges):
            lines.update((offsets[dim], ends[dim]))
    # A grid with lines at all box edges: a cell's elements lie in the same boxes.
    grid = [sorted(lines) for lines in edges]
    counts = np.zeros([len(lines) - 1 for lines in grid], dtype=np.int32)
    for first, last in spans:
        cells = []
        for dim, ordered in enumerate(grid):
            cells.append(slice(bisect_left(ordered, first[dim]), bisect_left(ordered, last[dim])))
        counts[tuple(cells)] += 1
    return bool((counts == 1).all())


def size_problem(path: Path, saved: SavedFile) -> str | None:
    """Problem if a file is missing or has another size than written, or None."""
    try:
        size = os.stat(path).st_size
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"
    return None if size == saved.bytes else f"{path} is cut or was altered: {size} bytes, {saved.bytes} were written"


def config_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """One line for each differing field, such as `neuron.tau`, with both values."""
    before = _by_field(saved)
    # As if saved: JSON has lists for tuples.
    after = _by_field(json.loads(json.dumps(now)))
    for name in sorted(before.keys() | after.keys()):
        if (name in before) != (name in after) or before.get(name) != after.get(name):
            old = reprlib.repr(before[name]) if name in before else "absent"
            new = reprlib.repr(after[name]) if name in after else "absent"
            yield f"{name}: saved {old}, now {new}"


def _by_field(config: Mapping[str, Any]) -> dict[str, Any]:
    fields = {}
    for part, values in config.items():
        for name, value in values.items():
            fields[f"{part}.{name}"] = value
    return fields
