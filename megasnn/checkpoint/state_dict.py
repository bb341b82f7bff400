"""Weights in other programs' files: a state_dict of torch.save or safetensors, whatever it is wrapped in."""

from __future__ import annotations

import argparse
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megasnn.files import CheckpointError

_USUAL = ("", "state_dict", "model_state_dict", "model", "net")
"""Keys under which programs keep a state_dict among other things, the commonest first."""
_PREFIXES = ("module.", "_orig_mod.")
"""Put in front of every name by DistributedDataParallel and torch.compile."""


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Reads a state_dict; nothing in the file is run. Values stay in the file until they are used.

    Norms whose `num_batches_tracked` is missing, as torch wrote them before 0.4.1, get a 0.

    Raises:
        CheckpointError: no such file, it cannot be read, or holds no state_dict, or several.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no file {path} to read weights from")
    try:
        content = load_file(path) if path.suffix == ".safetensors" else _load(path)
    except Exception as error:  # which one depends on what is in the file
        # Torch says first how to let the file run what it likes.
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].strip() or type(error).__name__
        raise CheckpointError(f"cannot read weights from {path}: {reason.splitlines()[0][:300]}") from None
    found = dict(_state_dicts(content))
    usual = [name for name in _USUAL if name in found]
    if not found:
        others = ", ".join(sorted(map(str, content))[:5]) if isinstance(content, Mapping) else type(content).__name__
        raise CheckpointError(f"{path} holds no state_dict: expected names with tensors, found {others}")
    if not usual and len(found) > 1:
        several = ", ".join(sorted(found))
        raise CheckpointError(
            f"{path} holds several state_dicts ({several}): save the one to take in a file of its own"
        )
    values = dict(found[usual[0]] if usual else next(iter(found.values())))
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in values):
            values = {name.removeprefix(prefix): value for name, value in values.items()}
    for norm in [name.removesuffix("running_mean") for name in values if name.endswith("running_mean")]:
        values.setdefault(f"{norm}num_batches_tracked", torch.tensor(0))
    return values


def _load(path: Path) -> Any:
    is_zip = zipfile.is_zipfile(path)  # not from before torch 1.6
    with torch.serialization.safe_globals([argparse.Namespace]):  # the flags of the run, beside the weights
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)


def _state_dicts(content: Any, at: str = "") -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """All dictionaries of tensors by names, and their keys; those of an optimizer have numbers."""
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        return
    if content and all(isinstance(value, Tensor) for value in content.values()):
        yield at, content
        return
    for name, value in content.items():
        yield from _state_dicts(value, f"{at}.{name}" if at else name)
