"""CIFAR-10's files are pickles, which can run any program: here they become numbers, text, lists and arrays alone.

Only instructions that make such values are followed, and the four names that NumPy's arrays need stand for functions of
this file. What an instruction declares is compared with the bytes that are there before it is followed.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from typing import Any

import numpy as np
from numpy.typing import NDArray

_KNOWN = frozenset(
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 STRING BINSTRING "
    "SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 UNICODE BINUNICODE SHORT_BINUNICODE EMPTY_DICT DICT SETITEM "
    "SETITEMS EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 GLOBAL STACK_GLOBAL REDUCE BUILD "
    "PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET".split()
)
_NUMBERED = ("PUT", "BINPUT", "LONG_BINPUT")  # make room for as many values as their number says


def unpickle(data: bytes) -> Any:
    """The value of a pickle whose arrays are of uint8, with two dimensions or one.

    Raises:
        ValueError: it is damaged, or holds anything but data.
    """
    try:
        for count, (instruction, argument, place) in enumerate(pickletools.genops(data)):
            if instruction.name not in _KNOWN or (
                instruction.name in _NUMBERED and not 0 <= int(argument or 0) <= count
            ):
                raise ValueError(f"its instruction {instruction.name} at byte {place} is none of an array's")
        return _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # there is no common class for what a damaged pickle makes Python raise
        raise ValueError(f"not a sound pickle of arrays: {str(error)[:200] or type(error).__name__}") from error


class _Array:
    """Stands for an array until its state comes, and then is one."""

    __slots__ = ("values",)
    values: NDArray[np.uint8]

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, content = state
        if type(dtype) is not _Dtype or type(content) is not bytes or fortran not in (False, 0):
            raise ValueError("an array is not of uint8 in the usual order")
        if not 1 <= len(shape) <= 2 or any(type(side) is not int or side < 0 for side in shape):
            raise ValueError("an array has no shape")
        if math.prod(shape) != len(content):
            raise ValueError(f"an array of {math.prod(shape)} bytes has {len(content)}")
        self.values = np.frombuffer(content, np.uint8).reshape(shape)


class _Dtype:
    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """Byte order and alignment: without meaning for uint8."""


class _Function:
    """What a name in a pickle stands for. It has no attributes that a pickle could change."""

    __slots__ = ()

    def __call__(self, *arguments: Any) -> Any:
        raise NotImplementedError


class _Class(_Function):
    """ndarray, which is only named."""

    __slots__ = ()


class _Reconstruct(_Function):
    __slots__ = ()

    def __call__(self, *arguments: Any) -> _Array:
        return _Array()


class _MakeDtype(_Function):
    __slots__ = ()

    def __call__(self, name: Any, *arguments: Any) -> _Dtype:
        if name not in ("u1", b"u1"):
            raise ValueError(f"an array of {str(name)[:20]!r}, not of uint8")
        return _Dtype()


class _Encode(_Function):
    """Newer Pythons write bytes as text for older ones."""

    __slots__ = ()

    def __call__(self, text: Any, encoding: Any) -> bytes:
        if type(text) is not str or encoding not in ("latin1", b"latin1"):
            raise ValueError("bytes are not written as text in latin1")
        return text.encode("latin1")


_NAMES: dict[tuple[str, str], _Function] = {
    ("numpy", "ndarray"): _Class(),
    ("numpy", "dtype"): _MakeDtype(),
    ("numpy.core.multiarray", "_reconstruct"): _Reconstruct(),
    ("numpy._core.multiarray", "_reconstruct"): _Reconstruct(),
    ("_codecs", "encode"): _Encode(),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"holds {module}.{name}, which CIFAR-10 does not")
        return _NAMES[module, name]


def array_of(value: Any) -> NDArray[np.uint8]:
    """The array that a value of a pickle is. Raises ValueError where it is none."""
    if type(value) is not _Array or not hasattr(value, "values"):
        raise ValueError(f"{type(value).__name__} where an array should be")
    return value.values
