"""Replicated modules: any `nn.Module` without sharded layers in it is a layer, whole on every tensor parallel rank.

Between layers activations are cut by channel. A plain module's input is gathered, every rank computes the same, and
each keeps its own channels of the output. So its weights have the same gradients on every rank, and nothing is summed.
A layer of torch's without tensors that computes the same with a rank's channels, as pooling does, is not gathered.

A module whose class is one of torch.nn, or a Sequential of such, knows no time: it is given `[T * N, C, ...]`. Any
other module is given `[T, N, C, ...]`. Those of SpikingJelly must be in step mode "m", and forget their state before
each micro-batch, or detach it before one that is a later window of the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megasnn.bundle import Bundle, entries_of, map_entries, plain_bundle
from megasnn.layers.context import BuildContext
from megasnn.layers.converted import ConvertedDropout, batch_norm, convert, in_table, spec_of
from megasnn.layers.dropout import drawing_for
from megasnn.layers.init import ModuleInitialiser, initializer_from_module, own_tensors
from megasnn.layers.norm import ParallelBatchNorm
from megasnn.layers.refusals import SEQUENCES, is_stateful, note_stepped, refuse
from megasnn.layers.shape_inference import mark_spikes
from megasnn.parallel.collectives import gather_alike, own_channels
from megasnn.parallel.sharding import Cut, describe_tensor
from megasnn.parallel_state import Group, alone


def replicate(module: nn.Module, context: BuildContext, initialise: ModuleInitialiser | None) -> nn.Module:
    """Makes a plain module on the meta device whole on every rank: describes its tensors, and swaps its batch norms and
    dropouts for ours.

    Args:
        initialise: called with each of its modules, after their own `reset_parameters`, to set initial values.
    Returns:
        the module itself, or what it is swapped for.
    Raises:
        ValueError: what cannot be computed alike on every layout.
    """
    module = _with_our_layers(module, context, initialise)
    for each in module.modules():
        if isinstance(each, ParallelBatchNorm):
            continue
        for name, tensor in own_tensors(each):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(context.dtype)
            shard = context.shard(tuple(tensor.shape), initialise=initializer_from_module(each, initialise, name))
            describe_tensor(each, name, shard)
        nn.Module._apply(each, lambda x: x.to("meta"), recurse=False)  # single numbers, which have had values so far
    return module


def _with_our_layers(module: nn.Module, context: BuildContext, initialise: ModuleInitialiser | None) -> nn.Module:
    """The module with its batch norms and dropouts swapped for ours of all channels, each at all places where it
    stands, or what it is swapped for."""
    of_all, ours = replace(context, tp=alone("tp")), dict[nn.Module, nn.Module]()
    for each in module.modules():
        if in_table(each) is batch_norm:
            ours[each] = convert(each, batch_norm, context, initialise, True)
        elif in_table(each) is ConvertedDropout:
            ours[each] = convert(each, ConvertedDropout, of_all, initialise)
    for each in [*module.modules()]:
        for name, child in each._modules.items():
            each._modules[name] = child if child is None else ours.get(child, child)
    return ours.get(module, module)


# --- layers


@dataclass(frozen=True)
class LayerCall:
    """Way in which a layer that knows nothing of ranks is called.

    Attributes:
        time_steps: that an input of a single one stands for.
        fold_time: whether it is given all time steps as one batch.
        whole: whether every rank computes all of it: its input is gathered, and a rank keeps its channels of the
            output, where they divide.
        dtype: of its input; None for what comes.
        classes: of the last layer, whose output is gathered to so many channels; 0 of all others.
        cuts: of its inputs' tensors, in their order; those that are missing are whole.
    """

    group: Group
    time_steps: int
    fold_time: bool
    whole: bool
    dtype: torch.dtype | None = None
    classes: int = 0
    cuts: Sequence[Cut | None] = ()

    def prepare_input(self, x: Tensor, cut: Cut | None) -> Tensor:
        x = _gathered(x, cut, self.group) if self.whole and cut is not None else x
        x = x.to(self.dtype) if self.dtype is not None and x.is_floating_point() else x
        if x.ndim < 3:
            return x
        if len(x) == 1 < self.time_steps:
            x = x.expand(self.time_steps, *x.shape[1:])
        return x.flatten(0, 1) if self.fold_time else x

    def restore_output(self, y: Tensor, frames: tuple[int, ...]) -> Tensor:
        """Output of the layer, of so many time steps and samples."""
        y = y.unflatten(0, frames) if self.fold_time else y
        if y.ndim < 3:
            return y
        if self.whole:
            return y if self.classes or y.shape[2] % self.group.size else own_channels(y, self.group)
        is_cut = y.shape[2] < self.classes == y.shape[2] * self.group.size
        return gather_alike(y, self.group) if is_cut else y


def _gathered(x: Tensor, cut: Cut, group: Group) -> Tensor:
    """All channels of a tensor that ranks cut, each block of it by itself."""
    y = gather_alike(x.movedim(cut.dim, 2), group)
    if cut.blocks > 1:
        y = y.unflatten(2, (group.size, cut.blocks, -1)).transpose(2, 3).flatten(2, 4)
    return y.movedim(2, cut.dim)


def is_whole(layer: nn.Module) -> bool:
    """Tells whether every rank computes all of a layer."""
    call: LayerCall | None = vars(layer).get("_call")
    return call is not None and call.whole


def folds_time(module: nn.Module) -> bool:
    """Tells whether a plain layer is given all time steps as one batch `[T * N, C, ...]`: it consists of torch's
    modules, and none of them works along the first dimension, as attention and recurrent layers do."""
    if not all(type(each).__module__.startswith("torch.nn.") for each in module.modules()):
        return False
    refuse(module, "torch")
    return not any(
        isinstance(each, SEQUENCES) or getattr(each, "dim", None) == 0 or getattr(each, "start_dim", None) == 0
        for each in module.modules()
    )


def plain_layer(
    module: nn.Module,
    name: str,
    context: BuildContext,
    initialise: ModuleInitialiser | None,
    *,
    whole: bool,
    cuts: Sequence[Cut | None] = (),
    classes: int = 0,
) -> nn.Module:
    """Makes a layer of a plain module: `whole` on every rank, or on a rank's channels.

    Args:
        name: global name. cuts: of its inputs. classes: of the last layer of a model.
    Raises:
        ValueError: what cannot be computed alike on every layout.
    """
    note_stepped(module)
    refuse(module, "plain")
    call = LayerCall(context.tp, context.time_steps, folds_time(module), whole, context.dtype, classes, cuts)
    return as_layer(replicate(module, context, initialise) if whole else module, name, call)


def as_layer(module: nn.Module, name: str, call: LayerCall) -> nn.Module:
    """Makes a layer of a module that knows nothing of ranks."""
    for path, each in module.named_modules(prefix=name):
        if isinstance(each, ConvertedDropout):
            each.name = path
        elif hasattr(each, "surrogate_function") and spec_of(each) is not None:
            each.register_forward_hook(lambda node, inputs, spikes: mark_spikes(spikes))
    vars(module)["_call"] = call
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
    call: LayerCall | None = vars(layer).get("_call")
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
    inputs = [map_entries(lambda entry: call.prepare_input(entry, next(cuts, None)), each) for each in (x, *more)]
    with drawing_for(samples, frames):
        output = plain_bundle(layer(*inputs))
    return map_entries(lambda y: call.restore_output(y, frames), output)
