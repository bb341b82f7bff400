"""Checkpoints of format 2, which say only in torch's `.metadata` where their pieces lie.

That file is a pickle, which may do anything when it is unpickled. Here its instructions are followed without calling or
importing anything: what would be an object is the name of its type with its arguments and its state. What comes out
is data, and checked like `pieces.json`.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasnn.files.described import DescriptionError

_MODULES = ("torch", "torch.serialization", "pathlib", "pathlib._local") + tuple(
    f"torch.distributed.checkpoint.{module}" for module in ("metadata", "filesystem")
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = ("BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE")
_COUNTS = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
# A pickle may refer to the same thing often, so what it unfolds to is bounded as well.
_MOST_INSTRUCTIONS, _MOST_PIECES, _MOST_CHECKSUMS = 4_000_000, 200_000, 4_000_000
_LONGEST_TEXT, _MOST_DIMENSIONS = 512, 16


@dataclass(eq=False)
class _Object:
    """What a pickle would make: a call of `name` with `arguments`, and the state that it would then be given."""

    name: str
    arguments: Any = ()
    state: Any = None


def saved_in(content: bytes, file: Path) -> dict[str, Any]:
    """What a `.metadata` says, in the shape of `pieces.json`, unchecked.

    Raises:
        DescriptionError: it holds something else than megasnn wrote.
    """
    try:
        return _as_pieces(_inert(content).state)
    except Exception as error:  # which one is up to whoever wrote the file
        reason = f"{type(error).__name__}: {error}"[:200]
        raise DescriptionError(f"{file}: {reason!r}; it was altered, or megasnn did not write it") from None


def _inert(content: bytes) -> Any:
    """The object in a pickle of protocol 4 or 5. Tuples become lists."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    marks: list[int] = []
    for count, (instruction, value, _) in enumerate(pickletools.genops(content)):
        name = instruction.name
        if count == _MOST_INSTRUCTIONS:
            raise ValueError(f"more than {count} instructions")
        elif name in _VALUES:
            stack.append(value)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _COUNTS:
            stack.append(_popped(stack, len(stack) - _COUNTS[name]))
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[value])
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "TUPLE":
            stack.append(_popped(stack, marks.pop()))
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name in ("APPEND", "APPENDS"):
            added = [stack.pop()] if name == "APPEND" else _popped(stack, marks.pop())
            stack[-1].extend(added)
        elif name in ("SETITEM", "SETITEMS"):
            added = _popped(stack, len(stack) - 2) if name == "SETITEM" else _popped(stack, marks.pop())
            stack[-1].update(zip(added[::2], added[1::2], strict=True))
        elif name == "STACK_GLOBAL":
            module, attribute = _popped(stack, len(stack) - 2)
            if _text(module) not in _MODULES:
                raise ValueError(f"{module}.{_text(attribute)} does not belong there")
            stack.append(_Object(f"{module}.{_text(attribute)}"))
        elif name in ("NEWOBJ", "REDUCE"):
            made, arguments = _popped(stack, len(stack) - 2)
            stack.append(_Object(made.name, arguments))
        elif name == "BUILD":
            state = stack.pop()
            stack[-1].state = state
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"the instruction {name} does not belong there")
    (result,) = stack
    return result


def _popped(stack: list[Any], start: int) -> list[Any]:
    if start < 0:
        raise ValueError("an instruction lacks its operands")
    top = stack[start:]
    del stack[start:]
    return top


def _as_pieces(metadata: dict[str, Any]) -> dict[str, Any]:
    stored: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    for index, info in metadata["storage_data"].items():
        stored[_text(index.state["fqn"]), tuple(_sizes(index.state["offset"]))] = info.state
    if len(stored) > _MOST_PIECES:
        raise ValueError(f"more than {_MOST_PIECES} pieces")
    if sum(len(info["crc32"]) for info in stored.values()) > _MOST_CHECKSUMS:
        raise ValueError(f"more than {_MOST_CHECKSUMS} checksums")
    tensors = []
    for name, tensor in metadata["state_dict_metadata"].items():
        pieces = []
        for chunk in tensor.state["chunks"]:
            offsets, sizes = _sizes(chunk.state["offsets"]), _sizes(chunk.state["sizes"])
            # Taken out: a list of chunks may be referred to more than once, a piece is there once.
            pieces.append({"offsets": offsets, "sizes": sizes} | _place(stored.pop((name, tuple(offsets)))))
        dtype = tensor.state["properties"].state[0].name.removeprefix("torch.")
        tensors.append({"name": _text(name), "shape": _sizes(tensor.state["size"]), "dtype": dtype, "pieces": pieces})
    return {"tensors": tensors}


def _place(info: dict[str, Any]) -> dict[str, Any]:
    return {
        "file": _text(info["relative_path"]),
        "position": _number(info["offset"]),
        "length": _number(info["length"]),
        "crc32": "".join(f"{_number(checksum):08x}" for checksum in info["crc32"]),
        "values": None if info.get("data") is None else _number(info["data"]),
    }


def _sizes(size: _Object) -> list[int]:
    """A torch.Size, whose only argument holds its entries."""
    (entries,) = size.arguments
    if len(entries) > _MOST_DIMENSIONS:
        raise ValueError(f"a shape of {len(entries)} dimensions")
    return [_number(entry) for entry in entries]


def _number(value: Any) -> int:
    if type(value) is not int or value.bit_length() > 63:
        raise ValueError("something else instead of a number of usual size")
    return value


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > _LONGEST_TEXT:
        raise ValueError("something else instead of a name")
    return value
