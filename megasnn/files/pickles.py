"""Pickles read as data: their instructions are followed without calling or importing anything.

A pickle may do anything when it is unpickled. Here an object becomes the name of its type with its arguments and its
state, and tuples become lists.
"""

from __future__ import annotations

import pickletools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_NUMBERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1")
_VALUES = frozenset(_NUMBERS) | {
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_TEXT_OF_PYTHON_2 = ("STRING", "BINSTRING", "SHORT_BINSTRING")
_COUNTS = {"EMPTY_LIST": 0, "EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MOST_INSTRUCTIONS = 4_000_000


@dataclass(eq=False)
class Inert:
    """What a pickle would make: a call of `name` with `arguments`, and the state that it would then be given."""

    name: str
    arguments: Any = ()
    state: Any = None


def read_pickle(content: bytes, modules: Collection[str]) -> Any:
    """The value of a pickle. Text that Python 2 wrote is bytes.

    Args:
        modules: whose names may be in it.

    Raises:
        ValueError: it is damaged, names another module, or holds what no data need.
    """
    try:
        return _read(content, modules)
    except Exception as error:  # there is no common class for what a damaged pickle leads to
        raise ValueError(f"no sound pickle: {str(error)[:200] or type(error).__name__}") from error


def _read(content: bytes, modules: Collection[str]) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    marks: list[int] = []
    value: Any
    for count, (instruction, value, _) in enumerate(pickletools.genops(content)):
        name = instruction.name
        if count == _MOST_INSTRUCTIONS:
            raise ValueError(f"more than {count} instructions")
        elif name in _VALUES:
            stack.append(value)
        elif name in _TEXT_OF_PYTHON_2:
            stack.append(value.encode("latin-1"))
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _COUNTS:
            stack.append(_popped(stack, len(stack) - _COUNTS[name]))
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[int(value)])
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[int(value)] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("TUPLE", "LIST"):
            stack.append(_popped(stack, marks.pop()))
        elif name in ("EMPTY_DICT", "DICT"):
            stack.append(_dictionary(_popped(stack, marks.pop()) if name == "DICT" else []))
        elif name in ("APPEND", "APPENDS"):
            added = [stack.pop()] if name == "APPEND" else _popped(stack, marks.pop())
            stack[-1].extend(added)
        elif name in ("SETITEM", "SETITEMS"):
            added = _popped(stack, len(stack) - 2) if name == "SETITEM" else _popped(stack, marks.pop())
            stack[-1].update(_dictionary(added))
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            module, attribute = value.split(" ") if name == "GLOBAL" else _popped(stack, len(stack) - 2)
            if type(module) is not str or type(attribute) is not str or module not in modules:
                raise ValueError(f"{str(module)[:80]}.{str(attribute)[:80]} does not belong there")
            stack.append(Inert(f"{module}.{attribute}"))
        elif name in ("NEWOBJ", "REDUCE"):
            made, arguments = _popped(stack, len(stack) - 2)
            stack.append(_made(made.name, arguments))
        elif name == "BUILD":
            state = stack.pop()
            stack[-1].state = state
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"the instruction {name} does not belong there")
    (result,) = stack
    return result


def _made(name: str, arguments: Any) -> Any:
    if name != "_codecs.encode":
        return Inert(name, arguments)
    text, encoding = arguments  # newer Pythons write bytes as text for older ones
    if type(text) is not str or encoding not in ("latin1", b"latin1"):
        raise ValueError("bytes are not written as text in latin1")
    return text.encode("latin1")


def _dictionary(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


def _popped(stack: list[Any], start: int) -> list[Any]:
    if start < 0:
        raise ValueError("an instruction lacks its operands")
    top = stack[start:]
    del stack[start:]
    return top
