"""What went wrong in the dry run of a layer, told with the place in the layer and in the user's code."""

from __future__ import annotations

import re
from pathlib import Path
from traceback import walk_tb
from types import FrameType

import torch
from torch import nn

_NOT_THE_USERS = (Path(__file__).parents[1], Path(torch.__file__).parent)


def explained(error: Exception, layer: nn.Module, inputs: int) -> str:
    """The text of an error that was raised while a layer was called with so many inputs.

    Before it stands the part of the layer that raised it; behind it the last line that is neither MegaSNN's nor
    torch's, and what to know of values that are missing and inputs that are too many or too few.
    """
    called = list(walk_tb(error.__traceback__))
    path, text = _part([frame for frame, _ in called], layer), str(error)
    if isinstance(error, KeyError):  # whose text is the key alone
        text = f"{type(error).__name__}: {text}"
    told = f"in {path}: {text}" if path else text
    lines = [f"{frame.f_code.co_filename}, line {number}" for frame, number in called if _is_the_users(frame)]
    if lines:
        told += f" ({lines[-1]})"
    if re.search(r"\bmeta\b", text, re.IGNORECASE):
        told += "; layers run once on the meta device, where tensors have shapes and no values"
    if isinstance(error, TypeError) and "positional argument" in text:
        told += f"; it is called with {inputs} input(s), which `takes` of the layer names"
    return told


def _part(frames: list[FrameType], layer: nn.Module) -> str:
    """The path of the innermost module that was called."""
    paths = {id(module): path for path, module in layer.named_modules()}
    callers = [id(frame.f_locals.get("self")) for frame in frames]
    return next((paths[each] for each in reversed(callers) if each in paths), "")


def _is_the_users(frame: FrameType) -> bool:
    return not any(Path(frame.f_code.co_filename).is_relative_to(folder) for folder in _NOT_THE_USERS)
