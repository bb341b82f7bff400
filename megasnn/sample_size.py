"""Bounds on the memory of one sample, for all formats: declared sizes are compared before anything is allocated.

A file of some kilobytes can declare an image, an array or a recording that no machine holds.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SAMPLE_MB = 512
"""Default of --max-sample-mb: an RGB image of 134 million pixels, 41 million events."""
SAMPLE_BYTES = SAMPLE_MB << 20
_NPY = b"\x93NUMPY"


def require_size(what: str, size: int, limit: int) -> None:
    """Raises ValueError for something of more bytes than the limit."""
    if size > limit:
        raise ValueError(
            f"{what} would take {size / (1 << 20):,.1f} MB, and a sample may take {limit / (1 << 20):g}; "
            "if it is sound, raise --max-sample-mb"
        )


def read_file(path: Path, limit: int) -> bytes:
    """Content of a file.

    Raises:
        ValueError: it has more bytes than the limit, or is a pipe, a device or a folder. It does not name the file.
        OSError: it cannot be opened.
    """
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ValueError("is no regular file")
    with open(path, "rb") as file:
        require_size("its content", os.fstat(file.fileno()).st_size, limit)
        return file.read(limit)


def load_arrays(data: bytes, limit: int = SAMPLE_BYTES) -> dict[str, NDArray]:
    """Arrays of an .npz by name, or fields of an .npy of one structured array; read-only.

    `numpy.load` would allocate what a header declares. Python objects, which would run code, are not read.

    Args:
        data: the whole file.
        limit: bytes that the arrays may have together.

    Raises:
        ValueError: it is neither, cut, damaged, or too large, or holds objects.
    """
    try:
        if data.startswith(_NPY):
            table = _array(data)
            return {name: table[name] for name in table.dtype.names or ()}
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            require_size("its arrays", sum(member.file_size for member in members), limit)
            arrays = {}
            for member in members:
                with archive.open(member) as file:  # given a size, zlib stops there whatever comes out of it
                    arrays[member.filename.removesuffix(".npy")] = _array(file.read(member.file_size))
            return arrays
    except Exception as error:  # zipfile, zlib and NumPy raise some ten classes for damaged bytes
        raise ValueError(f"not a sound NumPy file of {len(data)} bytes: {str(error)[:200]}") from error


def _array(content: bytes) -> NDArray:
    """Array of an .npy, on top of its bytes. Format: docs of `numpy.lib.format`."""
    end = 10 if content[len(_NPY) : len(_NPY) + 1] == b"\x01" else 12
    start = end + int.from_bytes(content[8:end], "little")
    shape, fortran, dtype = _header(content[:start])
    values = np.frombuffer(content, dtype, math.prod(shape), start)  # refuses objects, and more than there is
    return values.reshape(shape, order="F" if fortran else "C")


@lru_cache(maxsize=256)  # samples share them, and to parse one takes longer than to read a small array
def _header(content: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, Fortran order and type."""
    file = io.BytesIO(content)
    first = np.lib.format.read_magic(file) == (1, 0)
    read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
    header: tuple[tuple[int, ...], bool, np.dtype] = read(file)
    return header
