"""Replicated modules: any `nn.Module` without sharded layers in it is a layer, whole on every tensor parallel rank.

Between layers activations are cut by channel. The input of a layer that is whole is gathered, every rank computes the
same, and each keeps its own channels of the output; its weights have the same gradients on every rank. Plain modules
without tensors that work by channel, as pooling does, are not whole (`megasnn.layers.plain.by_channel`).

A module whose class is one of torch.nn, or a Sequential of such, knows no time: it is given `[T * N, C, ...]`. Any
other module is given `[T, N, C, ...]`. Those of SpikingJelly must be in step mode "m", and forget their state before
each micro-batch, or detach it before one that is a later window of the same samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megasnn.common.bundle import Bundle, entries_of, map_entries, plain_bundle
from megasnn.layers.context import BuildContext
from megasnn.layers.dropout import drawing_for
from megasnn.layers.init import ModuleInitialiser, own_tensors
from megasnn.layers.norm import ParallelBatchNorm
from megasnn.layers.plain.initial_values import initializer_from_module
from megasnn.layers.plain.refusals import SEQUENCES, is_stateful, note_stepped, require_supported
from megasnn.layers.plain.table import ConvertedDropout, convert, in_table, sharded_batch_norm, spec_of
from megasnn.layers.shape_inference import mark_spikes, max_of
from megasnn.parallel.collectives import gather_alike, own_channels
from megasnn.parallel.sharding import shards_of
from megasnn.parallel_state import Group


@dataclass(frozen=True)
class LayerCall:
    """Way in which a layer is called that knows nothing of ranks, or is whole on every one.

    Attributes:
        time_steps: that an input of a single one stands for.
        fold_time: whether it is given all time steps as one batch.
        dtype: of its input; None for what comes.
        group: the tensor parallel ranks that all compute the whole layer: its input is gathered, and a rank keeps its
            channels of the output, where they divide; None for a layer that is cut.
        cuts: whether ranks have their channels of each of the inputs' tensors; without them all are whole.
        is_last: whether the output stays whole, as logits are.
    """

    time_steps: int = 1
    fold_time: bool = False
    dtype: torch.dtype | None = None
    group: Group | None = None
    cuts: Sequence[bool] = ()
    is_last: bool = False

    def prepare_input(self, x: Tensor, is_cut: bool) -> Tensor:
        if self.group is not None and is_cut:
            largest, x = max_of(x), gather_alike(x, self.group)
            x = x if largest is None else mark_spikes(x, largest)
        x = x.to(self.dtype) if self.dtype is not None and x.is_floating_point() else x
        if x.ndim < 3:
            return x
        if len(x) == 1 < self.time_steps:
            x = x.expand(self.time_steps, *x.shape[1:])
        return x.flatten(0, 1) if self.fold_time else x

    def restore_output(self, y: Tensor, frames: tuple[int, ...]) -> Tensor:
        """Output of the layer, of so many time steps and samples."""
        y = y.unflatten(0, frames) if self.fold_time else y
        if self.group is None or self.is_last or y.ndim < 3 or y.shape[2] % self.group.size:
            return y
        return own_channels(y, self.group)


def make_whole(layer: nn.Module, group: Group, cuts: Sequence[bool], is_last: bool) -> None:
    """Lets all ranks of a group compute a layer that was built for one. Args: as of LayerCall."""
    call = vars(layer).get("_layer_call", LayerCall())
    vars(layer)["_layer_call"] = replace(call, group=group, cuts=cuts, is_last=is_last)


def folds_time(module: nn.Module) -> bool:
    """Tells whether a plain layer is given all time steps as one batch `[T * N, C, ...]`: it consists of torch's
    modules, and none of them works along the first dimension, as attention and recurrent layers do."""
    if not all(type(each).__module__.startswith("torch.nn.") for each in module.modules()):
        return False
    require_supported(module, "torch")
    return not any(
        isinstance(each, SEQUENCES) or getattr(each, "dim", None) == 0 or getattr(each, "start_dim", None) == 0
        for each in module.modules()
    )


def plain_layer(module: nn.Module, name: str, context: BuildContext, initialise: ModuleInitialiser | None) -> nn.Module:
    """Makes a layer of a plain module on the meta device, whole on every rank: describes its tensors, and swaps its
    batch norms and dropouts for ours.

    Args:
        name: global name.
        initialise: called with each of its modules, after their own `reset_parameters`, to set initial values.
    Raises:
        ValueError: what cannot be computed alike on every layout.
    """
    note_stepped(module)
    require_supported(module, "plain")
    dtype = None if context.numerics.traceable else context.dtype  # a trained model may be moved to another type
    call = LayerCall(context.time_steps, folds_time(module), dtype)
    ours = {
        each: convert(each, conversion, context, initialise)
        for each in module.modules()
        if (conversion := in_table(each)) in (sharded_batch_norm, ConvertedDropout)
    }
    module = swapped(module, ours)
    for each in module.modules():
        if isinstance(each, ParallelBatchNorm):
            continue
        for tensor_name, tensor in own_tensors(each):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(context.dtype)
            values = initializer_from_module(each, initialise, tensor_name)
            shards_of(each)[tensor_name] = context.shard(tuple(tensor.shape), initialise=values)
        nn.Module._apply(each, lambda x: x.to("meta"), recurse=False)  # single numbers, which have had values so far
    return as_layer(module, name, call)


def swapped(module: nn.Module, ours: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """A module with those in it swapped for others, each at all places where it stands, or what it is swapped for."""
    for each in [*module.modules()]:
        for name, child in each._modules.items():
            each._modules[name] = child if child is None else ours.get(child, child)
    return ours.get(module, module)


def as_layer(module: nn.Module, name: str, call: LayerCall) -> nn.Module:
    """Makes a layer of a module that knows nothing of ranks."""
    for path, each in module.named_modules(prefix=name):
        if isinstance(each, ConvertedDropout):
            each.name = path
        elif hasattr(each, "surrogate_function") and spec_of(each) is not None:
            each.register_forward_hook(lambda node, inputs, spikes: mark_spikes(spikes))
    vars(module)["_layer_call"] = call
    return module


def forget_state(layer: nn.Module) -> None:
    """Resets modules that keep a state, as SpikingJelly's neurons do."""
    for module in layer.modules():
        if is_stateful(module):
            module.reset()  # type: ignore[operator]


def apply_layer(layer: nn.Module, x: Bundle, samples: range | None, *more: Bundle, goes_on: bool = False) -> Bundle:
    """Calls any layer of a model on a micro-batch `[T, N, ...]` of these samples.

    Args:
        x, more: the outputs that it takes.
        goes_on: whether it is a later window of the samples that the last call was on; then state is kept.
    """
    call: LayerCall | None = vars(layer).get("_layer_call")
    if call is None:
        with drawing_for(samples):
            y: Bundle = layer(x, *more)
        return y if isinstance(y, Tensor) else plain_bundle(y)
    first = next(iter(entries_of(x).values()))
    frames = (call.time_steps if len(first) == 1 else len(first), *first.shape[1:2])
    for each in layer.modules():
        if is_stateful(each):
            each.detach() if goes_on else each.reset()  # type: ignore[operator]
    cuts = iter(call.cuts)
    inputs = [map_entries(lambda entry: call.prepare_input(entry, next(cuts, False)), each) for each in (x, *more)]
    with drawing_for(samples, frames):
        output = plain_bundle(layer(*inputs))
    return map_entries(lambda y: call.restore_output(y, frames), output)
