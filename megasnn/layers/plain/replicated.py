"""Replicated modules: any `nn.Module` without sharded layers, whole on every tensor-parallel rank.

A whole layer gathers its input, and each rank keeps own output channels. A layer with torch's modules alone takes
`[T * N, C, ...]`, any other `[T, N, C, ...]`. SpikingJelly's modules must be in step mode "m".
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from megasnn.layers.context import BuildContext
from megasnn.layers.facts import facts
from megasnn.layers.init import ModuleInitialiser, below, own_tensors
from megasnn.layers.norm import ParallelBatchNorm
from megasnn.layers.plain.initial_values import initializer_from_module
from megasnn.layers.plain.refusals import SEQUENCES, note_stepped, require_supported
from megasnn.layers.plain.table import ConvertedDropout, convert, in_table, sharded_batch_norm, spec_of
from megasnn.layers.plain_call import PlainCall
from megasnn.layers.shape_inference import mark_spikes


def plain_layer(module: nn.Module, name: str, context: BuildContext, initialise: ModuleInitialiser | None) -> nn.Module:
    """A whole layer from a plain module on the meta device, with MegaSNN's batch norms and dropouts.

    Args:
        name: global.
        initialise: as in `megasnn.shard`.
    Raises:
        ValueError: a module that cannot be computed alike on every layout.
    """
    note_stepped(module)
    require_supported(module, "plain")
    # A trained model may be moved to another type.
    dtype = None if context.numerics.traceable else context.dtype
    call = PlainCall(context.time_steps, folds_time(module), dtype)
    ours: dict[nn.Module, nn.Module] = {}
    for path, each in module.named_modules(prefix=name):
        conversion = in_table(each)
        if conversion in (sharded_batch_norm, ConvertedDropout):
            ours[each] = convert(each, conversion, context, below(path, initialise))
    module = replace_parts(module, ours)
    for path, each in module.named_modules(prefix=name):
        if not isinstance(each, ParallelBatchNorm):
            _describe_tensors(each, context, below(path, initialise))
    return as_layer(module, name, call)


def _describe_tensors(module: nn.Module, context: BuildContext, initialise: ModuleInitialiser | None) -> None:
    for name, tensor in own_tensors(module):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(context.dtype)
        values = initializer_from_module(module, initialise, name)
        facts(module).shards[name] = context.shard(tuple(tensor.shape), initialise=values)
    # Single numbers had values until here (`without_memory`), which the initialiser has copied.
    nn.Module._apply(module, lambda x: x.to("meta"), recurse=False)


def folds_time(module: nn.Module) -> bool:
    """Whether a plain layer takes `[T * N, C, ...]`: all its modules are torch's."""
    modules = [*module.modules()]
    if not all(type(each).__module__.startswith("torch.nn.") for each in modules):
        return False
    require_supported(module, "torch")
    # Modules that work along the first dimension need to see time.
    for each in modules:
        if isinstance(each, SEQUENCES) or getattr(each, "dim", None) == 0 or getattr(each, "start_dim", None) == 0:
            return False
    return True


def replace_parts(module: nn.Module, ours: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """The module, or its replacement, with parts replaced wherever they stand."""
    for each in [*module.modules()]:
        for name, child in each._modules.items():
            each._modules[name] = child if child is None else ours.get(child, child)
    return ours.get(module, module)


def as_layer(module: nn.Module, name: str, call: PlainCall) -> nn.Module:
    for path, each in module.named_modules(prefix=name):
        if isinstance(each, ConvertedDropout):
            each.name = path
        elif hasattr(each, "surrogate_function") and spec_of(each) is not None:
            each.register_forward_hook(lambda node, inputs, spikes: mark_spikes(spikes))
    facts(module).call = call
    return module
