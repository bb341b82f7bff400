"""Files: errors, JSON with a schema, size checks before allocation, durable writes, the cache."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import re
import reprlib
import stat
import threading
import zipfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from filelock import FileLock
from numpy.lib import format as npy
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

_T = TypeVar("_T")

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""For dataclasses read from files: no conversion of types, no unknown fields."""
StoredCount = Annotated[int, Field(ge=0, le=1 << 62)]
"""Number of bytes, samples or elements; an offset in a file."""
FreeForm = dict[str, JsonValue]
"""Values only for display and comparison, never trusted."""
SAMPLE_MB = 512
"""Default of --max-sample-mb: an RGB image of 134 million pixels, 41 million events."""
SAMPLE_LIMIT = "MEGASNN_MAX_SAMPLE_MB"
"""Environment variable set by --max-sample-mb. Worker processes inherit it."""
NAME_BYTES = 512
"""Longest name of a sample in a shard. Memory holds all names, padded to the longest."""
MOST_SHARDS = 100_000
"""Largest number of shards in a data path."""
# Making an adapter takes milliseconds: it reads the annotations of all fields.
_adapter = cache(TypeAdapter)
_SHOWN = 200  # characters of a value in a message
_PROBLEMS = 30  # lines of one error
FOLDER = "MEGASNN_CACHE"
"""Environment variable for the cache folder; by default megasnn in XDG_CACHE_HOME or ~/.cache."""
MACHINE_CODE = "numba"
"""Folder for the kernels' machine code."""
_ADVICE = f"set the environment variable {FOLDER} to a folder with space where only you can write"


class CheckpointError(ValueError):
    """A checkpoint cannot be written, read, or used. Each argument is one problem."""

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.args)


class MissingPackageError(ModuleNotFoundError):
    """A file requires a package that is not installed. The message has the command that installs it."""


class DamagedError(CheckpointError):
    """Checkpoint files are missing, cut or altered. Another checkpoint may be intact."""


class NoCheckpointError(CheckpointError):
    """No checkpoint there. A run may start anew."""


class DescriptionError(ValueError):
    """Names file, field, value and remedy."""


def raise_problems(title: str, problems: Iterable[str], kind: type[CheckpointError] = CheckpointError) -> None:
    """Raises one error with all distinct problems; beyond 30 they are only counted."""
    distinct = sorted(set(problems))
    if not distinct:
        return
    lines = [f"  {problem}" for problem in distinct[:_PROBLEMS]]
    if len(distinct) > _PROBLEMS:
        lines.append(f"  ... and {len(distinct) - _PROBLEMS} more")
    raise kind(title, *lines)


def in_message(value: object) -> str:
    """Shortened, with control characters escaped."""
    text = str(value) if isinstance(value, str | int | float) else reprlib.repr(value)
    if len(text) > _SHOWN:
        text = f"{text[:_SHOWN]}..."
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def quantity(number: int, noun: str) -> str:
    """Number and noun of a sentence, such as "1 micro-batch" and "2 micro-batches"."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{number} {noun[:-1]}ies"
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending}"


def described(
    kind: type[_T], content: bytes, file: object, *, advice: str = "it is damaged, or another program wrote it"
) -> _T:
    """Reads JSON as a pydantic type, such as a dataclass with `STRICT`.

    Raises DescriptionError for no JSON, or a missing, unknown, duplicate or wrong field, with `file` and `advice`.
    """
    try:
        value: _T = _adapter(kind).validate_json(content)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        text = f"{'.'.join(in_message(part) for part in first['loc']) or 'the file'}: {first['msg']}"
        if first["type"] not in ("missing", "json_invalid"):
            text += f", found {in_message(reprlib.repr(first['input']))}"
        raise DescriptionError(f"{file}: {text}; {advice}") from None
    try:
        # pydantic takes the last of several.
        json.loads(content, object_pairs_hook=unique)
    except ValueError as error:
        raise DescriptionError(f"{file}: {error}; {advice}") from None
    return value


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` for JSON objects. Raises ValueError for a duplicate name."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{in_message(name)} stands twice in one object; the second is {in_message(value)}")
        values[name] = value
    return values


def require_regular(path: Path) -> None:
    """Raises OSError for a folder, a pipe or a device."""
    # Reading a pipe would wait for its other end, and a device may have no end.
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is a folder, a pipe or a device, and should be a file", str(path))


def read_regular(path: Path) -> bytes:
    """Raises OSError, also for other kinds of files."""
    require_regular(path)
    return path.read_bytes()


def require_size(what: str, size: int) -> None:
    """Raises ValueError for a sample, or a part, above `SAMPLE_LIMIT`."""
    limit = float(os.environ.get(SAMPLE_LIMIT, SAMPLE_MB))
    if size > limit * (1 << 20):
        raise ValueError(
            f"{what} would take {size / (1 << 20):,.1f} MB, and a sample may take {limit:g}; "
            f"if it is sound, raise --max-sample-mb"
        )


def read_file(path: Path) -> bytes:
    """A sample's file. Raises OSError; ValueError for another kind or size."""
    if path.exists() and not path.is_file():
        # A pipe would wait for its other end.
        raise ValueError("is no regular file")
    require_size("its content", path.stat().st_size)
    return path.read_bytes()


def read_array(data: bytes) -> NDArray[Any]:
    """An .npy file's array, as a read-only view of `data`.

    Raises ValueError for another, cut, damaged or too large file, or Python objects.
    """
    file = io.BytesIO(data)
    try:
        read_header = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
        shape, is_fortran, dtype = read_header(file)
    except Exception as error:
        # NumPy has no common class for what damaged headers make it raise.
        raise ValueError(f"not a sound .npy file of {len(data)} bytes: {error}") from error
    if dtype.hasobject:
        raise ValueError("holds Python objects, which are not read")
    begin = file.tell()
    count = math.prod(shape)
    size = count * dtype.itemsize
    # A wrong header must allocate no memory.
    if min(shape, default=0) < 0 or size > len(data) - begin:
        raise ValueError(f"cut or damaged: its header says {size:,} bytes, and {len(data) - begin:,} are there")
    require_size("its array", size)
    return np.frombuffer(data, dtype, count, begin).reshape(shape, order="F" if is_fortran else "C")


def read_arrays(data: bytes) -> dict[str, NDArray]:
    """An .npz file's arrays by name, or an .npy file's as "array". Raises ValueError as `read_array`."""
    try:
        if data.startswith(npy.MAGIC_PREFIX):
            return {"array": read_array(data)}
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
            # Before unpacking: a small archive may hold large arrays.
            require_size("its arrays", sum(member.file_size for member in members))
            return {member.filename.removesuffix(".npy"): read_array(archive.read(member)) for member in members}
    except Exception as error:
        # zipfile and its decompressors have no common class.
        raise ValueError(f"not a sound NumPy file of {len(data)} bytes: {error}") from error


def sync(path: Path) -> None:
    """Waits until a file, or a folder's names, is on disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, text: str) -> None:
    """Writes or replaces a file in one step. Raises OSError, and leaves no partial file."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        aside.write_text(text)
        sync(aside)
        os.replace(aside, path)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise


class CacheError(ValueError):
    """A foreign, read-only or full cache folder. Names folder and remedy."""


def cache_folder(*parts: str) -> Path:
    """The cache folder, or a folder in it; created if missing.

    Raises CacheError if that fails, or others can write to it.
    """
    named = os.environ.get(FOLDER)
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(shared):
        # The XDG specification ignores relative paths.
        shared = "~/.cache"
    root = Path(named) if named else Path(shared, "megasnn")
    try:
        folder = root.expanduser().absolute()
        for part in ("", *parts):
            folder = folder / part
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = folder.stat()
            # Machine code in the cache is executed.
            if state.st_uid != os.geteuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise CacheError(f"another user owns or can write to the cache folder {folder}; {_ADVICE}")
    except (OSError, RuntimeError) as error:
        # RuntimeError: a user without a home.
        raise CacheError(f"cannot use the cache folder {root}: {error}; {_ADVICE}") from error
    return folder


def cached_name(source: Path, suffix: str, *version: str) -> str:
    # ctime changes even if a changed file gets its old size and mtime back.
    state = source.stat()
    content = f"{state.st_size} {state.st_mtime_ns} {state.st_ctime_ns}"
    return name_in_cache(source.name, suffix, str(source.absolute()), content, *version)


def name_in_cache(readable: str, suffix: str, *version: str) -> str:
    beginning = re.sub(r"[^A-Za-z0-9_.-]", "_", readable).lstrip(".")[:80]
    return f"{beginning}-{hashlib.blake2b(os.fsencode(chr(0).join(version)), digest_size=8).hexdigest()}{suffix}"


def build_once(target: Path, build: Callable[[Path], object]) -> Path:
    """`target`. If it is missing, one process per host builds it, complete or not at all.

    `build` writes to a temporary path. Raises CacheError for an OSError; other errors of `build` pass through.
    """
    if target.exists():
        return target
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(target.with_name(f".{target.name}.lock")):
            # The system releases it at the end of a process.
            # Another process may have built it while this one waited for the lock.
            if not target.exists():
                build(temporary)
                # Without it a power cut may leave an empty file under the final name.
                sync(temporary)
                os.replace(temporary, target)
    except OSError as error:
        raise CacheError(f"cannot make {target}: {error}; {_ADVICE}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return target
