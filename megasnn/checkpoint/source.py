"""A checkpoint or a weight file as tensors by name.

Weight files are torch.save's or safetensors, bare or inside a training program's dictionaries.
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
from megasnn.checkpoint.tensor_io import allocated, read_full
from megasnn.common.files import CheckpointError, in_message
from megasnn.models.registry import dialect_of, model_of
from megasnn.models.weight_names import NameMap

_USUAL_KEYS = ("", "state_dict", "model_state_dict", "model", "net")
"""Keys of a state_dict in files of other programs, the most common first."""
_PREFIXES = ("module.", "_orig_mod.")
"""Name prefixes from DistributedDataParallel and torch.compile."""


@dataclass(frozen=True)
class Source:
    """Tensors by name.

    Attributes:
        tensors: complete, on the CPU; on the meta device for a checkpoint opened without values.
        metadata: empty for a file.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    metadata: Metadata = Metadata()
    is_checkpoint: bool = False

    @property
    def dimensions(self) -> dict[str, Any] | None:
        """The model's; None if unknown."""
        found = (self.metadata.config or {}).get("model")
        return found if isinstance(found, dict) else None


def open_source(path: Path, values: bool = True) -> Source:
    """Opens a weight file, a run's checkpoint folder, or one checkpoint.

    Args:
        values: read and check a checkpoint's files as well.
    Raises:
        CheckpointError: it is missing or cannot be read.
    """
    if not path.is_dir():
        if not path.is_file():
            raise CheckpointError(f"{path} is not there: name a file of weights or a folder of checkpoints")
        return Source(path, read_state_dict(path))
    path = resolve(path, None)[0]
    metadata = read_metadata(path)
    if values:
        return Source(path, read_full(path, metadata, metadata.tensors), metadata, True)
    tensors = {name: allocated(saved, "meta") for name, saved in metadata.tensors.items()}
    return Source(path, tensors, metadata, True)


def in_our_names(source: Source) -> Source:
    """Raises CheckpointError if no known program uses their names."""
    if source.metadata.model or source.metadata.config is not None or model_of(None, source.tensors):
        return source
    return derived(source, dialect_of(source.tensors).to_ours(source.tensors))


def derived(source: Source, recipe: NameMap) -> Source:
    """Raises CheckpointError if the tensors do not fit together."""
    tensors = {}
    for name, made in recipe.items():
        parts = [source.tensors[part] for part in made.sources]
        tensors[name] = made.of(parts).contiguous()
    return replace(source, tensors=tensors)


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Reads a state_dict without running the file's code. Values stay in the file until use.

    Raises:
        CheckpointError: no such file, it cannot be read, or holds no state_dict, or several.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no file {path} to read weights from")
    try:
        content = load_file(path) if path.suffix == ".safetensors" else _load(path)
    except Exception as error:  # its type depends on the content of the file
        raise CheckpointError(f"cannot read weights from {path}: {_reason(error)}") from None
    values = dict(_only_state_dict(path, content))
    for name, value in values.items():
        kind = _unusable_kind(value)
        if kind:
            raise CheckpointError(f"{path}: {in_message(name)} is {kind}; save its values as a plain tensor")
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in values):
            values = {name.removeprefix(prefix): value for name, value in values.items()}
    for name in list(values):
        # torch before 0.4.1 wrote norms without `num_batches_tracked`: they get a 0.
        if name.endswith("running_mean"):
            values.setdefault(f"{name.removesuffix('running_mean')}num_batches_tracked", torch.tensor(0))
    return values


def _only_state_dict(path: Path, content: Any) -> Mapping[str, Tensor]:
    """Raises CheckpointError for none, or several under unusual keys."""
    found = dict(_state_dicts(content))
    if not found:
        others = type(content).__name__
        if isinstance(content, Mapping):
            others = ", ".join(map(in_message, sorted(map(str, content))[:5]))
        raise CheckpointError(f"{path} holds no state_dict: expected names with tensors, found {others}")
    for key in _USUAL_KEYS:
        if key in found:
            return found[key]
    if len(found) > 1:
        several = in_message(", ".join(sorted(found)))
        raise CheckpointError(
            f"{path} holds several state_dicts ({several}): save the one to take in a file of its own"
        )
    return next(iter(found.values()))


def _unusable_kind(value: Tensor) -> str:
    if value.is_meta:
        return "without values"
    if value.is_quantized:
        return "quantized"
    return "" if value.layout == torch.strided else "sparse"


def _load(path: Path) -> Any:
    is_zip = zipfile.is_zipfile(path)  # since torch 1.6; older files cannot be mapped
    with torch.serialization.safe_globals([argparse.Namespace]):  # many programs save their flags beside the weights
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)


def _reason(error: Exception) -> str:
    # torch's messages advise to let the file run code.
    text = str(error)
    if isinstance(error, OSError | SafetensorError):
        return text
    if code := re.search(r"GLOBAL ([\w.]+)", text):
        return f"it holds {code[1][:100]}, which would run code when read: save model.state_dict() alone"
    if "TorchScript" in text:
        return "it is a TorchScript program: save its state_dict()"
    return f"it is no file of torch.save, or is cut or damaged ({type(error).__name__})"


def _state_dicts(content: Any) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    waiting = deque([("", content)])
    opened = set[int]()
    while waiting:
        key, found = waiting.popleft()
        # Optimizers have numbers for names: they are no weights.
        if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
            continue
        if found and all(isinstance(value, Tensor) for value in found.values()):
            yield key, found
        elif id(found) not in opened:  # a file may hold a dictionary within itself
            opened.add(id(found))
            for name, value in found.items():
                waiting.append((f"{key}.{name}" if key else name, value))
