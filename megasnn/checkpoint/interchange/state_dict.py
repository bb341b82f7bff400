"""Reading files that other programs wrote with torch.save."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasnn.checkpoint.errors import CheckpointError

_WRAPPERS = ("state_dict", "model_state_dict", "model")


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Reads a state_dict from a file written by torch.save.

    It may lie under "state_dict", "model_state_dict" or "model". Nothing but tensors and plain containers is
    unpickled.

    Raises:
        CheckpointError: no such file, it cannot be read, or it holds something else.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"there is no file {path} to read weights from; check --load-spikingjelly")
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"cannot read weights from {path}: {error}") from None
    for wrapper in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if isinstance(content, Mapping) and all(isinstance(value, Tensor) for value in content.values()):
        return dict(content)
    raise CheckpointError(f"{path} holds no state_dict: expected names with tensors, found {_kind(content)}")


def _kind(content: Any) -> str:
    if not isinstance(content, Mapping):
        return type(content).__name__
    others = sorted(str(name) for name, value in content.items() if not isinstance(value, Tensor))
    return f"other values under {', '.join(others[:5])}"
