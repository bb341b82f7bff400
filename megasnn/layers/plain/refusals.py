"""Plain modules, without sharded layers in them: which they are, and which cannot be computed alike on every layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from megasnn.layers.context import BuildContext
from megasnn.layers.conv import ParallelConv
from megasnn.layers.dropout import DropPath, ParallelDropout
from megasnn.layers.init import own_tensors, tensors_of
from megasnn.layers.linear import ParallelLinear
from megasnn.layers.neuron import NeuronLayer
from megasnn.layers.norm import ParallelBatchNorm
from megasnn.layers.plain.table import class_name, in_table, is_multi_step, sharded_batch_norm
from megasnn.parallel.sharding import shards_of

SHARDED = (ParallelConv, ParallelLinear, ParallelBatchNorm, NeuronLayer, ParallelDropout, DropPath)

SEQUENCES = (
    *(nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoder, nn.TransformerEncoderLayer),
    *(nn.TransformerDecoder, nn.TransformerDecoderLayer, nn.RNNBase, nn.RNNCellBase),
)

_STEPPING = ("MultiStepContainer", "LinearRecurrentContainer", "ElementWiseRecurrentContainer")
"""Containers of SpikingJelly that call what is in them at every time step, in step mode "s"."""


def is_plain(module: nn.Module) -> bool:
    """Tells whether there is no sharded layer in a module."""
    return not any(isinstance(each, SHARDED) or shards_of(each) for each in module.modules())


def is_stateful(module: nn.Module) -> bool:
    return callable(getattr(module, "reset", None)) and not isinstance(module, NeuronLayer)


def note_stepped(module: nn.Module) -> None:
    """Notes which modules stand in containers of SpikingJelly's that call them at every time step."""
    for container in module.modules():
        if type(container).__name__ in _STEPPING:
            for part in [*container.modules()][1:]:
                vars(part)["_is_stepped"] = True


def _is_single_step(module: nn.Module) -> bool:
    return hasattr(module, "step_mode") and not is_multi_step(module) and not vars(module).get("_is_stepped")


def _name_of(test: Callable[[nn.Module, str, Any], object]) -> Callable[[nn.Module], str | None]:
    """Finds the first parameter or buffer of a module itself that passes a test."""
    return lambda module: next((name for name, x in own_tensors(module) if test(module, name, x)), None)


_SINGLE = "is in step mode 's': layers take all time steps at once, so give step_mode='m'"
_VALUES = "make modules in `layers`, as they are yielded, and their tensors with torch.empty, because torch.Tensor(...)"

PROBLEMS: Sequence[tuple[str, Callable[[Any], object], str]] = (
    (
        "plain inside shard",
        lambda each: isinstance(each, torch.jit.ScriptModule),
        "is compiled by TorchScript, which hides what it computes: give the module that it was made of",
    ),
    (
        "plain given",
        _name_of(lambda module, name, x: not x.is_meta and x.ndim > 0),
        f"has values in {{!r}}: {_VALUES} ignores the device they are made on; weights are loaded with --load",
    ),
    ("shard", lambda each: isinstance(each, SHARDED), "is cut already; shard is for plain layers"),
    (
        "plain inside kept cut",
        lambda each: isinstance(each, _BatchNorm) and in_table(each) is not sharded_batch_norm,
        "is a batch norm with a forward of its own, which ours would not have",
    ),
    ("plain", _is_single_step, _SINGLE),
    ("kept cut", lambda each: is_stateful(each) and _is_single_step(each), _SINGLE),
    ("torch", lambda each: getattr(each, "batch_first", False) is True, "takes time for the batch: batch_first=True"),
    (
        "inside",
        lambda each: is_stateful(each) and hasattr(each, "step_mode"),
        "keeps its state in a block of ours: use megasnn.ParallelNeuron, or make it a layer of its own",
    ),
    (
        "inside",
        _name_of(lambda module, name, x: name not in shards_of(module)),
        "does not say how ranks share {0!r}: move it, with what is computed from it, to a layer of its own; neurons of "
        "one's own declare it with self.per_channel({0!r}, initial value)",
    ),
)
"""Uses of a module, what finds a problem, and its text with the finding. Uses: "plain", in a layer without sharded
layers; "inside", in one with some; "torch", in a layer of torch's modules alone; "shard", in a network given to shard;
"given", the same while a model is built; "cut" and "kept", there, in the table of conversions or not."""


def problem_of(module: nn.Module, *uses: str) -> str | None:
    """Reason why a module, without those in it, cannot be computed alike on every layout."""
    for of_uses, find, text in PROBLEMS:
        if not set(uses).isdisjoint(of_uses.split()) and (found := find(module)):
            return text.format(found)
    return None


def require_supported(module: nn.Module, *uses: str) -> None:
    """Raises ValueError for a module, or one in it, that cannot be computed alike on every layout."""
    for path, each in module.named_modules():
        if problem := problem_of(each, *uses):
            raise ValueError(f"{module_label(path, each)} {problem}")


def module_label(path: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return f"{path} ({kind})" if path else kind


_ELEMENTWISE = {"Sequential", "Identity", "ReLU", "GELU", "SiLU", "Sigmoid", "Tanh"}
_ELEMENTWISE |= {"Hardtanh", "LeakyReLU", "ELU", "Softplus"}
_POOLS = [f"{kind}Pool{dims}d" for kind in ("Max", "Avg", "AdaptiveMax", "AdaptiveAvg") for dims in (1, 2, 3)]
_BY_CHANNEL = {*_ELEMENTWISE, *_POOLS, "Flatten", "Upsample", "SeqToANNContainer"}


def is_by_channel(module: nn.Module) -> bool:
    """Tells whether a module without tensors computes each channel by itself, as far as is known here."""
    kind = class_name(module)
    if kind is None or next(tensors_of(module), None) is not None:
        return False
    return hasattr(module, "surrogate_function") or kind in _BY_CHANNEL and all(map(is_by_channel, module.children()))


# --- layers that ranks share the rows of images of

_BY_ROWS = {*_ELEMENTWISE, "ModuleList", "ModuleDict"}


def refuse_mixed_rows(layer: nn.Module, context: BuildContext) -> None:
    """Raises ValueError where ranks share out rows for a layer, or a module in it, that mixes them, or does not say
    that it does not. MegaSNN's layers exchange what they need."""
    rows = context.row_group
    for path, each in layer.named_modules():
        if rows is not None and _mixes_rows(each):
            raise ValueError(
                f"{module_label(path, each)} mixes rows of images, or does not say that it computes each by itself "
                f"(mixes_rows = False in its class): it cannot be computed with --context-parallel-size "
                f"{rows.size} by rows; use --context-parallel-cut samples"
            )


def _mixes_rows(module: nn.Module) -> bool:
    """Tells whether a module, without those in it, needs rows that other ranks may have and does not get them."""
    said = getattr(module, "mixes_rows", None)
    if said is not None:
        return bool(said)
    # Neurons of one's own have surrogate functions of SpikingJelly's in them.
    ours = type(module).__module__.startswith(("megasnn.", "spikingjelly.activation_based.surrogate"))
    return not (ours or class_name(module) in _BY_ROWS or isinstance(module, NeuronLayer))
