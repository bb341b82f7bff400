"""Files: errors of what is read, JSON of known shape, sizes checked before memory is taken, and durable writes."""

from __future__ import annotations

import io
import os
import reprlib
import zipfile
import zlib
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

T = TypeVar("T")

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""For dataclasses that are read here: a number is no text, and unknown fields are refused."""
Count = Annotated[int, Field(ge=0, le=1 << 62)]
"""Number of bytes, samples or elements; an offset in a file."""
FreeForm = dict[str, JsonValue]
"""Values that are shown or compared, and trusted for nothing."""
SAMPLE_MB = 512
"""Default of --max-sample-mb: an RGB image of 134 million pixels, 41 million events."""
SAMPLE_LIMIT = "MEGASNN_MAX_SAMPLE_MB"
"""Environment variable that --max-sample-mb sets, so that worker processes inherit it."""
_SHOWN = 200  # characters of a value in a message
_PROBLEMS = 30  # lines of one error
_ZIP_ERRORS = OSError, ValueError, EOFError, KeyError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error


class CheckpointError(ValueError):
    """A checkpoint cannot be written, read, or used for this model. Every argument is one problem."""

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.args)


class DamagedError(CheckpointError):
    """Files are missing, cut or altered. Another checkpoint may be intact."""


class NoCheckpointError(CheckpointError):
    """No checkpoint at all was found where one was looked for; a run may choose to start anew."""


class DescriptionError(ValueError):
    """A description cannot be read. The message names the file, the field, the value found, and what to do."""


def raise_problems(title: str, problems: Iterable[str], kind: type[CheckpointError] = CheckpointError) -> None:
    """Raises one error with all distinct problems, when there is any; beyond 30 they are only counted."""
    if distinct := sorted(set(problems)):
        rest = [f"... and {len(distinct) - _PROBLEMS} more"] if len(distinct) > _PROBLEMS else []
        raise kind(title, *(f"  {problem}" for problem in distinct[:_PROBLEMS] + rest))


def in_message(value: object) -> str:
    """Text of a value for a message: short, and without what would steer a terminal."""
    text = str(value) if isinstance(value, str | int | float) else reprlib.repr(value)
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


@lru_cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def described(
    kind: type[T], content: bytes, file: object, *, advice: str = "it is damaged, or another program wrote it"
) -> T:
    """Reads JSON as a value of a type that pydantic knows, like a dataclass with `STRICT`.

    Args:
        file: where it comes from, for the error.
        advice: what to do when it is wrong, for the error.
    Raises:
        DescriptionError: it is no JSON, or a field is missing, unknown, or of another type or range.
    """
    try:
        return _adapter(kind).validate_json(content)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        text = f"{'.'.join(in_message(part) for part in first['loc']) or 'the file'}: {first['msg']}"
        if first["type"] not in ("missing", "json_invalid"):
            text += f", found {in_message(reprlib.repr(first['input']))}"
        raise DescriptionError(f"{file}: {text}; {advice}") from None


# --- sizes


def require_size(what: str, size: int) -> None:
    """Raises ValueError for a sample, or a part of one, of more bytes than `SAMPLE_LIMIT` allows."""
    limit = float(os.environ.get(SAMPLE_LIMIT, SAMPLE_MB))
    if size > limit * (1 << 20):
        raise ValueError(
            f"{what} would take {size / (1 << 20):,.1f} MB, and a sample may take {limit:g}; "
            f"if it is sound, raise --max-sample-mb"
        )


def read_file(path: Path) -> bytes:
    """Reads a regular file, or what a link leads to. Raises OSError, and ValueError for one that is too large."""
    if path.exists() and not path.is_file():  # a pipe would wait for its other end
        raise ValueError("is no regular file")
    require_size("its content", path.stat().st_size)
    return path.read_bytes()


def read_arrays(data: bytes) -> dict[str, NDArray]:
    """Arrays of an .npz, which is given whole, by name. Python objects are refused.

    Raises:
        ValueError: it is none, cut, damaged, or too large, or an array is not of numbers.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            require_size("its arrays", sum(member.file_size for member in archive.infolist()))
        loaded = np.load(io.BytesIO(data), allow_pickle=False)
        return {name: loaded[name] for name in loaded.files}
    except _ZIP_ERRORS as error:
        raise ValueError(f"not a sound NumPy file of {len(data)} bytes: {error}") from error


# --- durable writes


def sync(path: Path) -> None:
    """Waits until a file, or a folder's list of names, is on disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, text: str) -> None:
    """Writes or replaces a file by way of `.NAME.partial` beside it. Raises OSError; nothing is left of it then."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        aside.write_text(text)
        sync(aside)
        os.replace(aside, path)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise
