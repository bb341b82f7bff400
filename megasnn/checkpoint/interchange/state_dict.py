"""Reading files that other programs wrote with torch.save."""

from __future__ import annotations

import argparse
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasnn.checkpoint.errors import CheckpointError

_WRAPPERS = ("state_dict", "model_state_dict", "model")
_DATA_PARALLEL = "module."


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Reads a state_dict from a file written by torch.save, whole.

    It may lie under "state_dict", "model_state_dict" or "model", and its names may all begin with "module.". Nothing
    but tensors and plain containers is unpickled.

    Raises:
        CheckpointError: no such file, it cannot be read, or it holds something else.
    """
    return find_state_dict(load_file(path), path)


def load_file(path: str | os.PathLike[str]) -> Any:
    """What torch.save wrote: tensors, plain containers and an argparse.Namespace (timm's files have one).

    Raises:
        CheckpointError: no such file, or it cannot be read.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"there is no file {path} to read weights from; check --load-spikingjelly")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"cannot read weights from {path}: {error}") from None


def find_state_dict(content: Any, path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The state_dict in what a file holds. Raises CheckpointError when there is none."""
    for wrapper in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{path} holds no state_dict: expected names with tensors, found {_kind(content)}")
    if content and all(name.startswith(_DATA_PARALLEL) for name in content):
        return {name.removeprefix(_DATA_PARALLEL): value for name, value in content.items()}
    return dict(content)


def _kind(content: Any) -> str:
    if not isinstance(content, Mapping):
        return type(content).__name__
    others = sorted(str(name) for name, value in content.items() if not isinstance(value, Tensor))
    return f"other values under {', '.join(others[:5])}"
