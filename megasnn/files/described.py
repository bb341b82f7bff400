"""What describes data in files, read strictly: JSON into frozen dataclasses, the type and range of every field checked.

Whoever hands on a checkpoint, a folder of shards or a file of weights writes its description, checksums included. So it
is read as a stranger's: nothing in it runs, a file that it names lies in the folder of the description, and what it
takes to read it is bounded by its size. All that is wrong with a description is one error.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import reprlib
import stat
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

T = TypeVar("T")

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""For dataclasses that are read here: `@with_config(STRICT)`. A number is no text, and unknown fields are refused."""
LARGEST = 32 << 20
"""Bytes that a description may have, unless its reader says otherwise."""
LARGEST_NUMBER = 1 << 62
_MOST_VALUES = 1_000_000
_SHOWN = 200  # characters of a value in a message
_LONGEST_NUMBER = 40  # characters
_ERRORS_LISTED = 20_000  # listing one takes about a kilobyte
_ADVICE = "it is damaged, or another program wrote it; take it from its source again"


class DescriptionError(ValueError):
    """A description cannot be read. The message names the file, the field, the value found, and what to do."""


def _plain_name(name: str) -> str:
    if not is_plain_name(name):
        raise ValueError("should be the name of a file in the same folder")
    return name


def _addressable(shape: tuple[int, ...]) -> tuple[int, ...]:
    if math.prod(max(1, length) for length in shape) > LARGEST_NUMBER:  # strides are computed of empty tensors too
        raise ValueError("should have fewer elements than can be counted in 62 bits")
    return shape


Count = Annotated[int, Field(ge=0, le=LARGEST_NUMBER)]
"""A number of bytes, samples, elements; a place in a file."""
PlainName = Annotated[str, AfterValidator(_plain_name)]
"""The name of a file in the folder of the description."""
Shape = Annotated[tuple[Count, ...], Field(max_length=64), AfterValidator(_addressable)]
Crc32 = Annotated[str, Field(pattern="^[0-9a-f]{8}$")]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
FreeForm = dict[str, JsonValue]
"""Values that are shown or compared, and trusted for nothing."""
DtypeName = Literal[
    "float64", "float32", "float16", "bfloat16",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "complex128", "complex64", "complex32",
    "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
]  # fmt: skip
"""A type of elements, by its name in torch."""


def printable(text: str) -> str:
    """A stranger's text without what would steer a terminal."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def in_message(value: object) -> str:
    """A stranger's value as a message shows it: short, and without what would steer a terminal."""
    text = str(value) if isinstance(value, str | int | float) else reprlib.repr(value)
    return printable(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


def is_plain_name(name: str) -> bool:
    """Whether this names a file in a folder and nothing outside it, in letters that can be printed."""
    is_usual = name.isprintable() and len(name.encode()) <= 255
    return is_usual and name not in ("", ".", "..") and not {"/", os.sep} & set(name)


def read_described(kind: type[T], path: Path, *, advice: str = _ADVICE) -> T:
    """Reads a file of JSON, no link, as a value of this type.

    Args:
        kind: a dataclass with `STRICT`, or any other type that pydantic knows.
        advice: what to do when it is wrong, for the error.
    Raises:
        DescriptionError: it cannot be opened, is too large, or a field is missing, unknown, of another type or range.
    """
    try:
        with open_within(path.parent, path.name) as stream:
            content = read_bounded(stream, path)
    except OSError as error:
        raise DescriptionError(f"cannot read {path}: {error}") from None
    return described(kind, content, path, advice=advice)


def described(
    kind: type[T], content: bytes, file: object, *, advice: str = _ADVICE, most_values: int = _MOST_VALUES
) -> T:
    """JSON as a value of this type.

    Args:
        file: where it comes from, for the error.
        most_values: how many values there may be in it; each takes up to a kilobyte of memory when all are wrong.
    Raises:
        DescriptionError: as `read_described`.
    """
    values = sum(map(content.count, (b",", b"[", b"{")))
    if values > most_values:
        raise DescriptionError(f"{file}: {values} values are too many, up to {most_values} are read; {advice}")
    try:
        read = json.loads(
            content.decode(), object_pairs_hook=_refuse_fields, parse_int=_integer, parse_constant=_NoNumber
        )
        _refuse_unusual_numbers("the file", read)
        return _adapter(kind).validate_json(content)  # type: ignore[arg-type]
    except ValidationError as error:
        raise DescriptionError(f"{file}: {_first_problem(error)}; {advice}") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, nested too deep, a number of too many digits
        raise DescriptionError(f"{file}: {error}; {advice}") from None


@lru_cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


class _NoNumber(str):
    """A number in JSON that nothing here can hold, as it is written."""


def _refuse_fields(pairs: list[tuple[str, Any]]) -> None:
    """Refuses what pydantic accepts in an object, in fields without a type too: names twice, NaN, infinite numbers."""
    seen: set[str] = set()
    for name, value in pairs:
        if name in seen:
            raise ValueError(f"{_name(name)}: this field is there twice")
        seen.add(name)
        _refuse_unusual_numbers(_name(name), value)


def _refuse_unusual_numbers(field: str, value: Any) -> None:
    """Refuses NaN, infinite numbers and numbers of too many digits, in lists of lists too."""
    waiting = [value]
    while waiting:
        element = waiting.pop()
        if isinstance(element, list):
            waiting += element
        elif isinstance(element, _NoNumber) or (isinstance(element, float) and not math.isfinite(element)):
            raise ValueError(f"{field}: should be a finite number of usual size, found {_shown(element)}")


def _integer(text: str) -> int | _NoNumber:
    return 0 if len(text) <= _LONGEST_NUMBER else _NoNumber(text)


def _first_problem(error: ValidationError) -> str:
    if (count := error.error_count()) > _ERRORS_LISTED:
        return f"{count} fields are wrong"
    problem = error.errors(include_url=False, include_context=False)[0]
    text = f"{_field(problem['loc'])}: {problem['msg']}"
    if problem["type"] not in ("missing", "json_invalid"):
        text += f", found {_shown(problem['input'])}"
    return text + (f" (and {count - 1} more)" if count > 1 else "")


def _field(place: tuple[int | str, ...]) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{_name(part)}" for part in place)
    return "".join(parts).removeprefix(".") or "the file"


def _name(text: str) -> str:
    return text if text.isprintable() and 0 < len(text) <= 100 else repr(text[:100])


def _shown(value: Any) -> str:
    return reprlib.repr(value)


def open_within(folder: Path, name: str) -> io.FileIO:
    """Opens a file of a folder to read it, unbuffered.

    Raises:
        OSError: it cannot be opened, its name leads out of the folder, or it is a link, a pipe, a device or a folder.
    """
    if not is_plain_name(name):
        raise OSError(errno.EINVAL, f"no name of a file in the folder {folder}", name)
    return _open(folder / name, os.O_NOFOLLOW)


def open_regular(path: Path) -> io.FileIO:
    """Opens a file that the user named, which may be a link, to read it, unbuffered.

    Raises:
        OSError: it cannot be opened, or is a pipe, a device or a folder.
    """
    return _open(path, 0)


def _open(path: Path, flags: int) -> io.FileIO:
    try:
        # A pipe would wait for its other end.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
            raise OSError(errno.ELOOP, "is a link; put the file itself in its place", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return io.FileIO(handle, "rb")


def read_bounded(stream: io.FileIO, path: object, largest: int = LARGEST) -> bytes:
    """All that is in a file. Raises DescriptionError, before it is read, when that is more than `largest` bytes."""
    size = os.fstat(stream.fileno()).st_size
    if size > largest:
        raise DescriptionError(f"{path} has {size} bytes, up to {largest} are read; {_ADVICE}")
    parts = []
    while size > 0 and (part := stream.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
