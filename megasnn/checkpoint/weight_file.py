"""Weight files of other programs as tensors by name: torch.save's or safetensors.

A state_dict may lie inside a training program's dictionaries, beside a moving average, and its names behind a prefix.
"""

from __future__ import annotations

import argparse
import os
import re
import zipfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from megasnn.common.files import CheckpointError, in_message
from megasnn.models.registry import MODELS, all_dialects

_USUAL_KEYS = ("", "state_dict", "model_state_dict", "model", "net")
"""Keys of a state_dict in files of other programs, the most common first."""
_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes of all names, known or not: DistributedDataParallel's and AveragedModel's, and torch.compile's."""
_OF_AVERAGES = {"ema", "swa", "average", "averaged", "avg"}
"""Words in keys and prefixes of moving averages, such as `state_dict_ema` and `ema_model.`."""
_AVERAGED_STEPS = "n_averaged"
"""Entry of torch's AveragedModel beside the weights."""


@dataclass(frozen=True)
class WeightFile:
    """One state_dict of a file.

    Attributes:
        tensors: by name, without a prefix.
        notices: for the user: an average, a prefix taken off, and names left out.
    """

    tensors: dict[str, Tensor]
    notices: tuple[str, ...] = ()


class _Candidate(NamedTuple):
    """A state_dict in a file.

    Attributes:
        key: of the dictionary.
        prefix: of the names.
        is_average: of the weights over training steps.
    """

    key: str
    prefix: str
    values: Mapping[str, Tensor]
    is_average: bool

    @property
    def title(self) -> str:
        return in_message(": ".join(filter(None, (self.key, self.prefix))))


def read_weights(path: str | os.PathLike[str], ema: bool = True) -> WeightFile:
    """Reads one state_dict without running the file's code. Values stay in the file until use.

    Args:
        ema: take the moving average of the weights, if the file has one.
    Raises:
        CheckpointError: no such file, it cannot be read, or holds no state_dict, or several.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no file {path} to read weights from")
    try:
        content = load_file(path) if path.suffix == ".safetensors" else _load(path)
    except Exception as error:
        # Its type depends on the content of the file.
        raise CheckpointError(f"cannot read weights from {path}: {_reason(error)}") from None
    candidates = list(_candidates(path, content))
    averages = [each for each in candidates if each.is_average]
    plain = [each for each in candidates if not each.is_average]
    chosen = _only(path, averages if averages and (ema or not plain) else plain)
    values = _without_prefix(path, chosen)
    for name in list(values):
        # torch before 0.4.1 wrote norms without `num_batches_tracked`: they get a 0.
        if name.endswith("running_mean"):
            values.setdefault(f"{name.removesuffix('running_mean')}num_batches_tracked", torch.tensor(0))
    return WeightFile(values, tuple(_notices(path, chosen, averages, plain)))


def read_state_dict(path: str | os.PathLike[str], ema: bool = True) -> dict[str, Tensor]:
    """Tensors of `read_weights`."""
    return read_weights(path, ema).tensors


def _candidates(path: Path, content: Any) -> Iterator[_Candidate]:
    """State_dicts, one for each prefix of known names. Raises CheckpointError for none."""
    found = dict(_state_dicts(content))
    if not found:
        others = type(content).__name__
        if isinstance(content, Mapping):
            others = ", ".join(map(in_message, sorted(map(str, content))[:5]))
        raise CheckpointError(f"{path} holds no state_dict: expected names with tensors, found {others}")
    for key, values in found.items():
        for prefix in _prefixes(values):
            is_average = _AVERAGED_STEPS in values or _names_average(key) or _names_average(prefix)
            yield _Candidate(key, prefix, values, is_average)


def _prefixes(values: Mapping[str, Tensor]) -> list[str]:
    """Prefixes before names that a known model has in every size; otherwise that of known wrappers."""
    markers = [dialect.marker for dialect in all_dialects()]
    markers += [model.marker for model in MODELS.values() if model.marker]
    found = []
    for marker in markers:
        for name in values:
            if name == marker or name.endswith(f".{marker}"):
                found.append(name.removesuffix(marker))
    if found:
        return list(dict.fromkeys(found))
    prefix = ""
    names = [name for name in values if name != _AVERAGED_STEPS]
    # Twice, because wrappers nest in either order.
    for wrapper in 2 * _WRAPPERS:
        if all(name.startswith(prefix + wrapper) for name in names):
            prefix += wrapper
    return [prefix]


def _names_average(text: str) -> bool:
    return bool(_OF_AVERAGES & {*re.split(r"[^a-z]+", text.lower())})


def _only(path: Path, candidates: Sequence[_Candidate]) -> _Candidate:
    """Raises CheckpointError for several state_dicts under unusual keys, or several prefixes."""
    for key in _USUAL_KEYS:
        usual = [each for each in candidates if each.key == key]
        if len(usual) == 1:
            return usual[0]
    if len(candidates) > 1:
        several = ", ".join(sorted(each.title for each in candidates))
        raise CheckpointError(
            f"{path} holds several state_dicts ({several}): save the one to take in a file of its own"
        )
    return candidates[0]


def _without_prefix(path: Path, chosen: _Candidate) -> dict[str, Tensor]:
    """The chosen tensors. Raises CheckpointError for one without plain values."""
    values = {}
    for name, value in chosen.values.items():
        if not name.startswith(chosen.prefix) or name == _AVERAGED_STEPS:
            continue
        kind = _unusable_kind(value)
        if kind:
            raise CheckpointError(f"{path}: {in_message(name)} is {kind}; save its values as a plain tensor")
        values[name.removeprefix(chosen.prefix)] = value
    return values


def _notices(
    path: Path, chosen: _Candidate, averages: Sequence[_Candidate], plain: Sequence[_Candidate]
) -> Iterator[str]:
    if averages:
        taken = "the average of the weights" if chosen.is_average else "the weights, not their average"
        where = f" ({chosen.title})" if chosen.title else ""
        other = " (--no-ema: the weights)" if chosen.is_average and plain else ""
        yield f"{path} holds an average of the weights: takes {taken}{where}{other}"
    others = {each.prefix for each in (*averages, *plain) if each.values is chosen.values}
    left = []
    for name in chosen.values:
        if name != _AVERAGED_STEPS and not name.startswith(tuple(others)):
            left.append(in_message(name))
    if left:
        yield f"{path}: names without the prefix {chosen.prefix} are left out: {', '.join(left[:5])}"


def _unusable_kind(value: Tensor) -> str:
    if value.is_meta:
        return "without values"
    if value.is_quantized:
        return "quantized"
    return "" if value.layout == torch.strided else "sparse"


def _load(path: Path) -> Any:
    # Since torch 1.6; older files cannot be mapped.
    is_zip = zipfile.is_zipfile(path)
    with torch.serialization.safe_globals([argparse.Namespace]):
        # Many programs save their flags beside the weights.
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
        elif id(found) not in opened:
            # A file may hold a dictionary within itself.
            opened.add(id(found))
            for name, value in found.items():
                waiting.append((f"{key}.{name}" if key else name, value))
