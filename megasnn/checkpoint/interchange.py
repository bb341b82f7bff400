"""Weights to and from SpikingJelly's Spikformer, through an explicit table of names.

The tensors are the same on both sides, shape by shape; only names differ:

    here                                     spikingjelly.activation_based.model.spikformer
    patch_embed.stages.0.conv.weight         patch_embed.stages.0.conv_bn.block.0.weight
    patch_embed.stages.0.norm.running_mean   patch_embed.stages.0.conv_bn.block.1.running_mean
    blocks.0.attention.qkv.conv.weight       blocks.0.attn.qkv_conv_bn.0.weight
    blocks.0.attention.neuron.w              blocks.0.attn.attn_lif.w          (parametric LIF only)
    blocks.0.mlp.fc1.norm.weight             blocks.0.mlp.fc1.1.weight
    head.weight                              head.weight
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.checkpoint.agreement import gather
from megasnn.checkpoint.errors import CheckpointError, raise_problems
from megasnn.sharding import ShardedTensor

STAGES = 4
_NORM_TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
_WRAPPERS = ("state_dict", "model_state_dict", "model")


def spikingjelly_names(depth: int, parametric: bool) -> dict[str, str]:
    """Our global name -> SpikingJelly's name, for every tensor of a Spikformer with `depth` blocks.

    Args:
        parametric: the neurons are parametric LIF and have a trained time constant `w` each.
    """
    units: list[tuple[str, str, str, str]] = []  # our prefix; their convolution, norm and neuron
    for stage in [f"stages.{index}" for index in range(STAGES)] + ["positional_encoding"]:
        unit = f"patch_embed.{stage}"
        units.append((unit, f"{unit}.conv_bn.block.0", f"{unit}.conv_bn.block.1", f"{unit}.neuron"))
    names: dict[str, str] = {}
    for block in (f"blocks.{index}" for index in range(depth)):
        for ours, theirs in (("qkv", "qkv"), ("projection", "proj")):
            unit, other = f"{block}.attention.{ours}", f"{block}.attn.{theirs}"
            units.append((unit, f"{other}_conv_bn.0", f"{other}_conv_bn.1", f"{other}_lif"))
        for layer in (1, 2):
            unit = f"{block}.mlp.fc{layer}"
            units.append((unit, f"{unit}.0", f"{unit}.1", f"{block}.mlp.neuron{layer}"))
        if parametric:
            names[f"{block}.attention.neuron.w"] = f"{block}.attn.attn_lif.w"
    for unit, conv, norm, neuron in units:
        names[f"{unit}.conv.weight"] = f"{conv}.weight"
        names |= {f"{unit}.norm.{tensor}": f"{norm}.{tensor}" for tensor in _NORM_TENSORS}
        if parametric:
            names[f"{unit}.neuron.w"] = f"{neuron}.w"
    return names | {"head.weight": "head.weight", "head.bias": "head.bias"}


def from_spikingjelly(state_dict: Mapping[str, Tensor], depth: int | None = None) -> dict[str, Tensor]:
    """A SpikingJelly Spikformer's state_dict under our global names. The tensors are not copied.

    Args:
        depth: number of blocks; None takes what the names say.

    Raises:
        CheckpointError: names are missing or unexpected (lists them, as SpikingJelly calls them).
    """
    ours = spikingjelly_names(_depth(state_dict, depth), parametric=_is_parametric(state_dict))
    _require_equal(ours.values(), state_dict, "this is not the state_dict of SpikingJelly's Spikformer:")
    return {name: state_dict[theirs] for name, theirs in ours.items()}


def to_spikingjelly(tensors: Mapping[str, Tensor], depth: int | None = None) -> dict[str, Tensor]:
    """Global tensors of a Spikformer as a state_dict that SpikingJelly's model loads strictly; no copies.

    Raises:
        CheckpointError: names are missing or unexpected (lists them, as we call them).
    """
    ours = spikingjelly_names(_depth(tensors, depth), parametric=_is_parametric(tensors))
    _require_equal(ours, tensors, "these are not the tensors of a Spikformer:")
    return {theirs: tensors[name] for name, theirs in ours.items()}


def _depth(names: Iterable[str], depth: int | None) -> int:
    if depth is not None:
        return depth
    found = (re.match(r"blocks\.(\d+)\.", name) for name in names)
    return max((int(match[1]) + 1 for match in found if match), default=0)


def _is_parametric(names: Iterable[str]) -> bool:
    return any(name.endswith(".w") for name in names)


def _require_equal(expected: Iterable[str], given: Iterable[str], title: str) -> None:
    expected, given = set(expected), set(given)
    missing = [f"{name}: missing" for name in expected - given]
    raise_problems(title, missing + [f"{name}: unexpected" for name in given - expected])


def load_globals_into(
    tensors: Iterable[ShardedTensor],
    values: Mapping[str, Tensor],
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Copies this rank's part of every global tensor into the model, converted to the model's dtype.

    Collective over `process_group`, the group of all ranks (None for a process on its own): together they
    must take exactly the tensors given.

    Raises:
        CheckpointError: on every rank, before anything is changed: a tensor is missing, one is taken by
            nobody, or a shape differs.
    """
    entries = list(tensors)
    reports = gather(process_group, ([entry.name for entry in entries], list(_mismatches(entries, values))))
    unexpected = set(values) - {name for names, _ in reports for name in names}
    problems = [problem for _, found in reports for problem in found]
    problems += [f"{name}: given, but this model has no such tensor" for name in unexpected]
    raise_problems("these weights are not this model's:", problems)
    with torch.no_grad():
        for entry in entries:
            for piece in entry.shard.pieces():
                piece.of_local(entry.tensor).copy_(piece.of_global(values[entry.name]))


def _mismatches(entries: Iterable[ShardedTensor], values: Mapping[str, Tensor]) -> Iterable[str]:
    for entry in entries:
        value = values.get(entry.name)
        if value is None:
            yield f"{entry.name}: missing"
        elif tuple(value.shape) != entry.shard.global_shape:
            needed = list(entry.shard.global_shape)
            yield f"{entry.name}: has shape {list(value.shape)}, this model needs {needed}"


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
