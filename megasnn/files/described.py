"""JSON from files, read strictly into dataclasses: types and ranges of all fields are checked, nothing in it runs."""

from __future__ import annotations

import errno
import io
import json
import os
import reprlib
import stat
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

T = TypeVar("T")

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""For dataclasses that are read here: a number is no text, and unknown fields are refused."""
LARGEST = 32 << 20
"""Bytes that a description may have, unless its reader says otherwise."""
Count = Annotated[int, Field(ge=0, le=1 << 62)]
"""A number of bytes, samples, elements; a place in a file."""
FreeForm = dict[str, JsonValue]
"""Values that are shown or compared, and trusted for nothing."""
_SHOWN = 200  # characters of a value in a message
_ADVICE = "it is damaged, or another program wrote it; take it from its source again"


class DescriptionError(ValueError):
    """A description cannot be read. The message names the file, the field, the value found, and what to do."""


def in_message(value: object) -> str:
    """Text of a value for a message: short, and without what would steer a terminal."""
    text = str(value) if isinstance(value, str | int | float) else reprlib.repr(value)
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def described(kind: type[T], content: bytes, file: object, *, advice: str = _ADVICE) -> T:
    """JSON as a value of this type.

    Args:
        kind: a dataclass with `STRICT`, or any other type that pydantic knows.
        file: where it comes from, for the error.
        advice: what to do when it is wrong, for the error.
    Raises:
        DescriptionError: it is no JSON, or a field is missing, unknown, twice there, or of another type or range.
    """
    try:
        json.loads(content, object_pairs_hook=_once, parse_constant=_refuse)
        return _adapter(kind).validate_json(content)  # type: ignore[arg-type]
    except ValidationError as error:
        raise DescriptionError(f"{file}: {_first_problem(error)}; {advice}") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, nested too deep, a number of too many digits
        raise DescriptionError(f"{file}: {error}; {advice}") from None


@lru_cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"{in_message(max(names, key=names.count))}: this field is there twice")
    return dict(pairs)


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is no finite number")


def _first_problem(error: ValidationError) -> str:
    problem, count = error.errors(include_url=False, include_context=False)[0], error.error_count()
    text = f"{'.'.join(in_message(part) for part in problem['loc']) or 'the file'}: {problem['msg']}"
    if problem["type"] not in ("missing", "json_invalid"):
        text += f", found {in_message(reprlib.repr(problem['input']))}"
    return text + (f" (and {count - 1} more)" if count > 1 else "")


def open_regular(path: Path) -> io.FileIO:
    """Opens a file that the user named, which may be a link, to read it, unbuffered.

    Raises:
        OSError: it cannot be opened, or is a pipe, a device or a folder.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for its other end
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return io.FileIO(handle, "rb")


def read_bounded(stream: io.FileIO, path: object, largest: int = LARGEST) -> bytes:
    """All that is in a file. Raises DescriptionError, before it is read, when that is more than `largest` bytes."""
    size = os.fstat(stream.fileno()).st_size
    if size > largest:
        raise DescriptionError(f"{path} has {size} bytes, up to {largest} are read; {_ADVICE}")
    return io.BufferedReader(stream).read(size)
