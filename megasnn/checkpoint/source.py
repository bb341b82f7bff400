"""A checkpoint or a file of weights as tensors by name.

A file of weights is a state_dict of torch.save or safetensors, bare or inside dictionaries of a training program.
"""

from __future__ import annotations

import argparse
import os
import re
import zipfile
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from megasnn.checkpoint.folder import resolve
from megasnn.checkpoint.format import Metadata, read_metadata
from megasnn.checkpoint.tensor_io import read_full
from megasnn.common.files import CheckpointError, in_message
from megasnn.models.registry import dialect_of, model_of
from megasnn.models.weight_names import NameMap

_USUAL = ("", "state_dict", "model_state_dict", "model", "net")
"""Keys under which programs keep a state_dict among other things, the commonest first."""
_PREFIXES = ("module.", "_orig_mod.")
"""Put in front of every name by DistributedDataParallel and torch.compile."""


@dataclass(frozen=True)
class Source:
    """Tensors by name.

    Attributes:
        path: file or folder.
        tensors: complete, on the CPU; of a checkpoint opened without values on the meta device.
        metadata: of a checkpoint; empty for a file.
        is_checkpoint: False for a file.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    metadata: Metadata = Metadata()
    is_checkpoint: bool = False

    @property
    def dimensions(self) -> dict[str, Any] | None:
        """The model's dimensions; None where they are not known."""
        found = (self.metadata.config or {}).get("model")
        return found if isinstance(found, dict) else None


def open_source(path: Path, values: bool = True) -> Source:
    """Opens a file of torch.save or safetensors, a run's folder of checkpoints, or one checkpoint in it.

    With `values` a checkpoint's files are read, too, and checked. Raises CheckpointError for what cannot be read.
    """
    if not path.is_dir():
        if not path.is_file():
            raise CheckpointError(f"{path} is not there: name a file of weights or a folder of checkpoints")
        return Source(path, read_state_dict(path))
    path = resolve(path, None)[0]
    metadata = read_metadata(path)
    if values:
        return Source(path, read_full(path, metadata, metadata.tensors), metadata, True)
    tensors = {
        name: torch.empty(saved.shape, dtype=getattr(torch, saved.dtype), device="meta")
        for name, saved in metadata.tensors.items()
    }
    return Source(path, tensors, metadata, True)


def in_our_names(source: Source) -> Source:
    """The same tensors under our global names. Raises CheckpointError for names of no program known here."""
    if source.metadata.model or source.metadata.config is not None or model_of(None, source.tensors):
        return source
    return derived(source, dialect_of(source.tensors).to_ours(source.tensors))


def derived(source: Source, recipe: NameMap) -> Source:
    """Tensors made from those of another source. Raises CheckpointError where they do not fit together."""
    tensors = {
        name: made.of(source.tensors[each] for each in made.sources).contiguous() for name, made in recipe.items()
    }
    return replace(source, tensors=tensors)


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
        raise CheckpointError(f"cannot read weights from {path}: {_reason(error)}") from None
    found = dict(_state_dicts(content))
    usual = [name for name in _USUAL if name in found]
    if not found:
        others = type(content).__name__
        if isinstance(content, Mapping):
            others = ", ".join(map(in_message, sorted(map(str, content))[:5]))
        raise CheckpointError(f"{path} holds no state_dict: expected names with tensors, found {others}")
    if not usual and len(found) > 1:
        several = in_message(", ".join(sorted(found)))
        raise CheckpointError(
            f"{path} holds several state_dicts ({several}): save the one to take in a file of its own"
        )
    values = dict(found[usual[0]] if usual else next(iter(found.values())))
    for name, value in values.items():
        if value.is_meta or value.is_quantized or value.layout != torch.strided:
            kind = "without values" if value.is_meta else "quantized" if value.is_quantized else "sparse"
            raise CheckpointError(f"{path}: {in_message(name)} is {kind}; save its values as a plain tensor")
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


def _reason(error: Exception) -> str:
    """Our words for an error of `_load`: torch's own advise to let the file run code."""
    text = str(error)
    if isinstance(error, OSError | SafetensorError):
        return text
    if code := re.search(r"GLOBAL ([\w.]+)", text):
        return f"it holds {code[1][:100]}, which would run code when read: save model.state_dict() alone"
    if "TorchScript" in text:
        return "it is a TorchScript program: save its state_dict()"
    return f"it is no file of torch.save, or is cut or damaged ({type(error).__name__})"


def _state_dicts(content: Any) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """All dictionaries of tensors by names, and their keys; those of an optimizer have numbers."""
    waiting, opened = deque([("", content)]), set[int]()
    while waiting:
        at, found = waiting.popleft()
        if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
            continue
        if found and all(isinstance(value, Tensor) for value in found.values()):
            yield at, found
        elif id(found) not in opened:  # a file may hold a dictionary within itself
            opened.add(id(found))
            waiting += [(f"{at}.{name}" if at else name, value) for name, value in found.items()]
