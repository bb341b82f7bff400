"""Checkpoints of format 2, which say only in torch's `.metadata` where their pieces lie.

That file is a pickle. It is read as data (`megasnn.files.pickles`), and what comes out is checked like `pieces.json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megasnn.files.described import DescriptionError
from megasnn.files.pickles import Inert, read_pickle

_MODULES = ("torch", "torch.serialization", "pathlib", "pathlib._local") + tuple(
    f"torch.distributed.checkpoint.{module}" for module in ("metadata", "filesystem")
)
# A pickle may refer to the same thing often, so what it unfolds to is bounded as well.
_MOST_PIECES, _MOST_CHECKSUMS = 200_000, 4_000_000
_LONGEST_TEXT, _MOST_DIMENSIONS = 512, 16


def saved_in(content: bytes, file: Path) -> dict[str, Any]:
    """What a `.metadata` says, in the shape of `pieces.json`, unchecked.

    Raises:
        DescriptionError: it holds something else than megasnn wrote.
    """
    try:
        return _as_pieces(read_pickle(content, _MODULES).state)
    except Exception as error:  # which one depends on what is in the file
        reason = f"{type(error).__name__}: {error}"[:200]
        raise DescriptionError(f"{file}: {reason!r}; it was altered, or megasnn did not write it") from None


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


def _sizes(size: Inert) -> list[int]:
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
