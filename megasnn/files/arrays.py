"""NumPy's .npz and .npy, read from bytes: every size that they declare is checked before anything of it is made.

`numpy.load` allocates what a header declares, and a member of an .npz unpacks to a thousand times its size. Python
objects, which would run code, are not read by either.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megasnn.files.sample_size import SAMPLE_BYTES, require_size

_NPY = b"\x93NUMPY"
_ZIP_MEMBER = b"PK\x01\x02"  # begins a line of the list at the end of a zip file
_MOST_ARRAYS = 64
_ENCRYPTED = 1
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_ZIP_ERRORS = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    NotImplementedError,  # a damaged version or compression
    RuntimeError,  # a damaged flag
    zipfile.BadZipFile,
    zlib.error,
)


def read_arrays(data: bytes, limit: int = SAMPLE_BYTES) -> dict[str, NDArray]:
    """The arrays of an .npz by name, or the fields of an .npy of one structured array; they cannot be written to.

    Args:
        data: the whole file.
        limit: bytes that the arrays may have together.

    Raises:
        ValueError: it is neither, cut, damaged, or too large, or an array is not of numbers.
    """
    try:
        if data.startswith(_NPY):
            array = _array(data, "the array", limit)
            return {field: array[field] for field in array.dtype.names or ()}
        if data.count(_ZIP_MEMBER) > _MOST_ARRAYS:
            raise ValueError(f"holds more than {_MOST_ARRAYS} arrays")
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            require_size("its arrays", sum(member.file_size for member in members), limit)
            arrays = {_name(member): _member(archive, member, limit) for member in members}
    except _ZIP_ERRORS as error:
        raise ValueError(f"not a sound NumPy file of {len(data)} bytes: {error}") from error
    if len(arrays) < len(members):
        raise ValueError("not a sound NumPy file: an array is there twice")
    return arrays


def _name(member: zipfile.ZipInfo) -> str:
    name, dot, ending = member.filename.rpartition(".")
    if dot + ending != ".npy":
        raise ValueError(f"{member.filename[:80]!r} is no array")
    return name


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, limit: int) -> NDArray:
    if member.flag_bits & _ENCRYPTED or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"the array {_name(member)!r} is encrypted, or compressed in a way that NumPy does not use")
    with archive.open(member) as file:
        return _array(file.read(member.file_size), f"the array {_name(member)[:80]!r}", limit)


def _array(content: bytes, what: str, limit: int) -> NDArray:
    """The array of an .npy, on top of its bytes."""
    start = _header_bytes(content)
    try:
        shape, fortran, dtype = _header(content[:start])
    except Exception as error:  # the header is a Python expression: NumPy has no common class for what damage makes it
        raise ValueError(f"{what} has a header that is damaged ({type(error).__name__}: {str(error)[:200]})") from None
    if dtype.hasobject or dtype.kind not in "biufV" or any(type(side) is not int or side < 0 for side in shape):
        raise ValueError(f"{what} is not of numbers, but {dtype} {shape}")
    size, left = math.prod(shape) * dtype.itemsize, len(content) - start
    require_size(what, size, limit)
    if size != left:
        raise ValueError(f"{what} should have {size} bytes, it has {left}")
    array = np.frombuffer(content, dtype, math.prod(shape), start)
    return array.reshape(shape, order="F" if fortran else "C")


def _header_bytes(content: bytes) -> int:
    """How many bytes of an .npy come before its values, by its first ones. Source: the docs of `numpy.lib.format`."""
    end = 10 if content[len(_NPY) : len(_NPY) + 1] == b"\x01" else 12
    return end + int.from_bytes(content[8:end], "little")


@lru_cache(maxsize=256)  # samples share them, and to parse one takes longer than to read a small array
def _header(content: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether in Fortran's order, and type."""
    file = io.BytesIO(content)
    header: tuple[tuple[int, ...], bool, np.dtype] = _HEADERS[np.lib.format.read_magic(file)](file)
    return header
