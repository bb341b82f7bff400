"""Plain modules, without sharded layers, and reasons to refuse them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from megasnn.layers.apply import is_stateful
from megasnn.layers.context import BuildContext
from megasnn.layers.conv import ParallelConv
from megasnn.layers.dropout import DropPath, ParallelDropout
from megasnn.layers.facts import facts
from megasnn.layers.init import own_tensors, tensors_of
from megasnn.layers.layer import LayerTraits
from megasnn.layers.linear import ParallelLinear
from megasnn.layers.neuron import NeuronLayer
from megasnn.layers.norm import ParallelBatchNorm
from megasnn.layers.plain.table import class_name, in_table, is_multi_step, sharded_batch_norm
from megasnn.parallel_state import Group

SHARDED = (ParallelConv, ParallelLinear, ParallelBatchNorm, NeuronLayer, ParallelDropout, DropPath)
SEQUENCES = (
    *(nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoder, nn.TransformerEncoderLayer),
    *(nn.TransformerDecoder, nn.TransformerDecoderLayer, nn.RNNBase, nn.RNNCellBase),
)

# SpikingJelly's containers that call their parts at every time step; the parts are in step mode "s".
_STEPPING = ("MultiStepContainer", "LinearRecurrentContainer", "ElementWiseRecurrentContainer")
_POINTWISE = {
    *("Sequential", "Identity", "ReLU", "GELU", "SiLU", "Sigmoid", "Tanh"),
    *("Hardtanh", "LeakyReLU", "ELU", "Softplus"),
}
_POOLS = {f"{kind}Pool{dims}d" for kind in ("Max", "Avg", "AdaptiveMax", "AdaptiveAvg") for dims in (1, 2, 3)}
_BY_CHANNEL = {*_POINTWISE, *_POOLS, "Flatten", "Upsample", "SeqToANNContainer"}
_BY_PIXEL = {*_POINTWISE, "ModuleList", "ModuleDict"}

_SINGLE = "is in step mode 's': layers take all time steps at once, so give step_mode='m'"


def is_plain(module: nn.Module) -> bool:
    return not any(isinstance(each, SHARDED) or facts(each).shards for each in module.modules())


def note_stepped(module: nn.Module) -> None:
    for container in module.modules():
        if type(container).__name__ in _STEPPING:
            for part in container.modules():
                if part is not container:
                    facts(part).is_stepped = True


class _Problem(NamedTuple):
    """Reason to refuse a module, without its parts.

    Attributes:
        uses: the module's places, see `_PROBLEMS`.
        find: module -> the finding; false for none.
        text: the module's name comes before it, the finding into it.
    """

    uses: Sequence[str]
    find: Callable[[Any], object]
    text: str


def _is_single_step(module: nn.Module) -> bool:
    return hasattr(module, "step_mode") and not is_multi_step(module) and not facts(module).is_stepped


def _with_values(module: nn.Module) -> str | None:
    return next((name for name, x in own_tensors(module) if not x.is_meta and x.ndim > 0), None)


def _without_shard(module: nn.Module) -> str | None:
    """First tensor name without a shard."""
    return next((name for name, _ in own_tensors(module) if name not in facts(module).shards), None)


_PROBLEMS = (
    _Problem(
        ("plain", "inside", "shard"),
        lambda each: isinstance(each, torch.jit.ScriptModule),
        "is compiled by TorchScript, which hides the operations: give the module from before the compilation",
    ),
    _Problem(
        ("plain", "building"),
        _with_values,
        "has values in {!r}: make each module in `layers`, where it is yielded, and its tensors with torch.empty; "
        "torch.Tensor(...) ignores the meta device. Weights are loaded with --load",
    ),
    _Problem(("shard",), lambda each: isinstance(each, SHARDED), "is sharded already; shard is for plain layers"),
    _Problem(
        ("plain", "inside", "kept", "cut"),
        lambda each: isinstance(each, _BatchNorm) and in_table(each) is not sharded_batch_norm,
        "is a batch norm with a forward of its own, which MegaSNN's batch norm would not run",
    ),
    _Problem(("plain",), _is_single_step, _SINGLE),
    _Problem(("kept", "cut"), lambda each: is_stateful(each) and _is_single_step(each), _SINGLE),
    _Problem(
        ("torch",),
        lambda each: getattr(each, "batch_first", False) is True,
        "would take time for the batch, because of batch_first=True",
    ),
    _Problem(
        ("inside",),
        lambda each: is_stateful(each) and hasattr(each, "step_mode"),
        "keeps state inside a block of sharded layers: use megasnn.ParallelNeuron, or make it a layer of its own",
    ),
    _Problem(
        ("inside",),
        _without_shard,
        "has the tensor {0!r}, and nothing tells how ranks share it: move the tensor and its computation to a layer "
        "of its own; a neuron declares the tensor with self.per_channel({0!r}, initial value)",
    ),
)
"""Problems by the place of a module:

    plain: in a layer without sharded layers
    torch: in a layer of torch's modules alone
    inside: in a layer with sharded layers
    shard: in a network for `megasnn.shard`
    building: in such a network, while a model is built
    cut: in such a network, in the table of conversions
    kept: in such a network, not in the table
"""


def problem_of(module: nn.Module, *uses: str) -> str | None:
    """Why a module, without its parts, cannot be computed alike on every layout; None if it can."""
    for problem in _PROBLEMS:
        found = None if set(uses).isdisjoint(problem.uses) else problem.find(module)
        if found:
            return problem.text.format(found)
    return None


def require_supported(module: nn.Module, *uses: str) -> None:
    """Raises ValueError if a module or part cannot be computed alike on every layout."""
    for path, each in module.named_modules():
        problem = problem_of(each, *uses)
        if problem:
            raise ValueError(f"{module_label(path, each)} {problem}")


def module_label(path: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return f"{path} ({kind})" if path else kind


def is_by_channel(module: nn.Module) -> bool:
    """Whether a module without tensors is known to compute each channel by itself."""
    kind = class_name(module)
    if kind is None or next(tensors_of(module), None) is not None:
        return False
    if hasattr(module, "surrogate_function"):
        return True
    return kind in _BY_CHANNEL and all(is_by_channel(child) for child in module.children())


def refuse_mixing(layer: nn.Module, context: BuildContext) -> None:
    """Raises ValueError for a module that may mix image rows or tokens, if ranks divide them."""
    if context.row_group is not None:
        _refuse_mixed(layer, context.row_group, _mixes_rows, "row", "rows of images")
    if context.token_group is not None:
        _refuse_mixed(layer, context.token_group, _mixes_tokens, "token", "tokens")


def _refuse_mixed(
    layer: nn.Module, group: Group, mixes: Callable[[nn.Module], bool], each_one: str, divided: str
) -> None:
    for path, each in layer.named_modules():
        if mixes(each):
            raise ValueError(
                f"{module_label(path, each)} may mix {divided}, which --context-parallel-size {group.size} divides "
                f"over ranks: use --context-parallel-cut samples, or set mixes_{each_one}s = False in the class of a "
                f"module that computes each {each_one} by itself"
            )


def _mixes_rows(module: nn.Module) -> bool:
    declared = getattr(module, "mixes_rows", LayerTraits.mixes_rows)
    if declared is not None:
        return bool(declared)
    # A user's neuron has a surrogate function of SpikingJelly as a part.
    ours = type(module).__module__.startswith(("megasnn.", "spikingjelly.activation_based.surrogate"))
    return not (ours or class_name(module) in _BY_PIXEL or isinstance(module, NeuronLayer))


def _mixes_tokens(module: nn.Module) -> bool:
    declared = getattr(module, "mixes_tokens", LayerTraits.mixes_tokens)
    if declared is not None:
        return bool(declared)
    if getattr(module, "mixes_rows", LayerTraits.mixes_rows):
        # Tokens are the rows of a signal.
        return True
    is_surrogate = type(module).__module__.startswith("spikingjelly.activation_based.surrogate")
    return not (is_surrogate or class_name(module) in _BY_PIXEL or isinstance(module, NeuronLayer))
