"""Replicated modules: any `nn.Module` without sharded layers in it is a layer, whole on every tensor parallel rank.

Between layers activations are cut by channel. A plain module's input is gathered, every rank computes the same, and
each keeps its own channels of the output. So its weights have the same gradients on every rank, and nothing is summed.
What treats every channel by itself (pooling, activation functions) stays cut.

A module whose class is one of torch.nn, or a Sequential of such, knows no time: it is given `[T * N, C, ...]`. Any
other module is given `[T, N, C, ...]`. Those of SpikingJelly must be in step mode "m", and forget their state before
each micro-batch, or detach it before one that is a later window of the same samples. A plain module may also stand
inside a layer whose other parts are cut, its inputs gathered, and may have been compiled by its author.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from megasnn.bundle import Bundle, entries_of, map_entries, plain_bundle
from megasnn.layers.context import BuildContext
from megasnn.layers.conv import ParallelConv
from megasnn.layers.converted import ConvertedDropout, convert, our_batch_norm
from megasnn.layers.dropout import KeyedLayer
from megasnn.layers.init import ModuleInitialiser, initializer_from_module, note_paths, own_tensors, to_meta
from megasnn.layers.linear import ParallelLinear
from megasnn.layers.norm import ParallelBatchNorm
from megasnn.layers.plain import fold_time, is_channelwise, is_stateful, refuse_attached, refuse_what_differs
from megasnn.layers.shape_inference import (
    UNMARKED,
    Cut,
    MixedChannels,
    cut_of,
    is_replicated,
    mark_cut,
    mark_replicated,
    untracked,
)
from megasnn.parallel.collectives import gather_alike, own_channels
from megasnn.parallel.sharding import describe_tensor
from megasnn.parallel_state import Group


def replicate(
    module: nn.Module, context: BuildContext, *, first: bool, last: bool, initialise: ModuleInitialiser | None = None
) -> nn.Module:
    """Makes a layer of a plain module on the meta device: describes its tensors, and swaps its batch norms for ours.

    Args:
        first: whether its input is whole on every rank already. last: whether its output is to stay whole.
        initialise: called with each of its modules, after their own `reset_parameters`, to set initial values.
    Returns:
        the layer: the module itself, or what it is swapped for.
    Raises:
        ValueError: what cannot be computed alike on every layout: dropout, which draws without a key,
            lazy modules, buffers that are not saved, SpikingJelly's single-step mode; a module with values.
    """
    module = compiling_itself(module)
    note_paths(module)
    refuse_what_differs(module)
    if context.carries:
        refuse_attached(module)
    knows_no_time = fold_time(module)
    stays_cut = knows_no_time and not (first or last) and all(is_channelwise(each) for each in module.modules())
    module = _describe_replicated(module, context, initialise)
    call = CallSpec(
        context.tp,
        context.time_steps,
        fold_time=knows_no_time,
        dtype=context.dtype,
        gathers=not first and not stays_cut,
        cuts=not last and not stays_cut,
        follows=stays_cut,
    )
    vars(module)["_call"] = call
    return module


def _describe_replicated(module: nn.Module, context: BuildContext, initialise: ModuleInitialiser | None) -> nn.Module:
    """Swaps the batch norms in a plain module for ours, and describes its tensors as whole on every rank."""
    module = _with_our_norms(module, context, initialise)
    for each in module.modules():
        if isinstance(each, ParallelBatchNorm):
            continue
        for name, tensor in own_tensors(each):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(context.dtype)
            shard = context.shard(tuple(tensor.shape), initialise=initializer_from_module(each, initialise, name))
            describe_tensor(each, name, shard)
        to_meta(each)
    return module


def call_as_sharded(module: nn.Module, context: BuildContext, *, folded: bool) -> nn.Module:
    """Makes a layer of a module whose parts are sharded layers, or treat every channel by themselves.

    Args:
        folded: whether it is given `[T * N, C, ...]`.
    """
    if context.carries:
        refuse_attached(module)
    vars(module)["_call"] = CallSpec(context.tp, context.time_steps, fold_time=folded, sharded=True, follows=True)
    return module


def placed(module: nn.Module, name: str, *, first: bool, last: bool, classes: int) -> nn.Module:
    """A layer of `call_as_sharded`, told its global name and where it stands in the model.

    Args:
        first: its input is whole on every rank. last: its output has to be, and has so many `classes`.
    """
    call: CallSpec = vars(module)["_call"]
    cuts_input = first and not _begins_with_weights(module)
    vars(module)["_call"] = replace(call, cuts_input=cuts_input, classes=classes if last else None)
    for path, each in module.named_modules(prefix=name):
        if isinstance(each, ConvertedDropout):
            each.name = path
    return module


def is_called_as_sharded(module: nn.Module) -> bool:
    """Tells whether `call_as_sharded` made this layer."""
    return "_call" in vars(module) and vars(module)["_call"].sharded


def call_plain(layer: nn.Module, samples: range | None, *inputs: Bundle, goes_on: bool = False) -> Bundle:
    """Calls a layer that `replicate` or `call_as_sharded` made on a micro-batch.

    Args:
        goes_on: see `apply_layer`.
    """
    call: CallSpec = vars(layer)["_call"]
    for each in layer.modules():
        if is_stateful(each):
            each.detach() if goes_on else each.reset()  # type: ignore[operator]
        if isinstance(each, ConvertedDropout):
            each.samples = samples
    first = next(iter(entries_of(inputs[0]).values()))
    if call.gathers and is_replicated(first):  # of a linear layer whose features do not divide
        vars(layer)["_call"] = call = replace(call, gathers=False)
    taken = [call.taken(x) if isinstance(x, Tensor) else map_entries(call.taken_entry, x) for x in inputs]
    with nullcontext() if call.follows else untracked(), uncompiled_in_dry_runs(layer, first):
        if call.fold_time:
            frames = (call.time_steps if len(first) == 1 else len(first), first.shape[1])
            y = layer(*(map_entries(lambda x: x.flatten(0, 1), x) for x in taken))
            y = map_entries(lambda y: y.unflatten(0, frames), y)
        else:
            y = layer(*taken)
    if call.cuts or call.classes is not None:
        with untracked():
            return map_entries(call.given, y)
    return y if call.follows else map_entries(mark_replicated, y)


def is_replicated_layer(layer: nn.Module) -> bool:
    """Tells whether a layer is a plain one that every tensor parallel rank has whole."""
    return "_call" in vars(layer) and not vars(layer)["_call"].follows


def apply_layer(layer: nn.Module, x: Bundle, samples: range | None, *more: Bundle, goes_on: bool = False) -> Bundle:
    """Calls any layer of a model on a micro-batch `[T, N, ...]` of these samples.

    Args:
        x, more: the outputs that it takes.
        goes_on: whether it is a later window of the samples that the last call was on; then state is kept.
    """
    if "_call" in vars(layer):
        output = call_plain(layer, samples, x, *more, goes_on=goes_on)
    else:
        output = layer(x, *more, samples) if isinstance(layer, KeyedLayer) else layer(x, *more)
    plain: Bundle = plain_bundle(output)
    return plain


@dataclass(frozen=True)
class CallSpec:
    """Way in which a layer that knows nothing of ranks is called.

    Attributes:
        fold_time: whether it is given all time steps as one batch.
        dtype: of its input; None for what comes.
        gathers: whether the input is cut by channel, and made whole. cuts: the same of the output.
        sharded: whether its parts are cut; otherwise it is whole.
        cuts_input: of a sharded one, whose input every rank has whole: whether it is cut first.
        follows: whether functions in its forward are followed (`megasnn.layers.cut_tracking`).
        classes: of a sharded one: how many channels the output has when it is whole, where it has to be.
    """

    group: Group
    time_steps: int
    fold_time: bool
    dtype: torch.dtype | None = None
    gathers: bool = False
    cuts: bool = False
    sharded: bool = False
    follows: bool = False
    cuts_input: bool = False
    classes: int | None = None

    def taken(self, x: Tensor) -> Tensor:
        """Makes of a tensor what the module is given: all time steps, and the channels that it works on."""
        if len(x) == 1 < self.time_steps:
            x = x.expand(self.time_steps, *x.shape[1:])
        x = x if self.dtype is None else x.to(self.dtype)
        if self.gathers:
            return gather_alike(x, self.group)
        if self.cuts_input and not x.shape[2] % self.group.size:
            with untracked():
                return mark_cut(own_channels(x, self.group), Cut(2) if self.group.size > 1 else None)
        return x

    def taken_entry(self, x: Tensor) -> Tensor:
        """The same for an entry of a bundle: without channels it stays as it is, and whole numbers keep their type."""
        if x.ndim < 3:
            return x
        return self.taken(x) if x.is_floating_point() else replace(self, dtype=x.dtype).taken(x)

    def given(self, y: Tensor) -> Tensor:
        """An output as the next layer, or the loss, wants it: whole where its channels do not divide by the ranks."""
        if self.classes is not None:
            is_cut = y.ndim > 2 and y.shape[2] < self.classes == y.shape[2] * self.group.size
            return mark_replicated(gather_alike(y, self.group)) if is_cut else y
        if self.group.size == 1 or y.ndim < 3 or y.shape[2] % self.group.size:
            return mark_replicated(y)
        return mark_cut(own_channels(y, self.group), Cut(2))

    def __deepcopy__(self, memo: dict[int, Any]) -> CallSpec:
        return self  # a process group cannot be copied


def _begins_with_weights(module: nn.Module) -> bool:
    """Tells whether the first thing that is done to the input is a product with weights, which take it whole as
    well."""
    while isinstance(module, nn.Sequential) and len(module):
        module = next((each for each in module if not isinstance(each, nn.Flatten)), module[0])
    return isinstance(module, (ParallelConv, ParallelLinear))


def _with_our_norms(module: nn.Module, context: BuildContext, initialise: ModuleInitialiser | None) -> nn.Module:
    conversion = our_batch_norm(module) if isinstance(module, _BatchNorm) else None
    if conversion is not None:
        return convert(module, conversion, context, initialise, True)
    for name, child in module.named_children():
        setattr(module, name, _with_our_norms(child, context, initialise))
    return module


# --- plain modules inside of layers whose other parts are cut


def gather_inside(module: nn.Module, context: BuildContext, initialise: ModuleInitialiser | None) -> nn.Module:
    """Makes a plain module whole where it is, inside a layer whose other parts are cut: what it is given is gathered,
    and of what it gives every rank keeps its part of the dimension in which the first input was cut.

    Raises ValueError as `replicate`.
    """
    refuse_what_differs(module)
    module = _describe_replicated(module, context, initialise)
    module.forward = _Gathered(module.forward, context.tp, context.dtype)
    vars(module)["_is_replicated"] = True
    return module


class _Gathered:
    """The forward of a whole module on a rank's parts of its inputs. The dry run shows how they are cut."""

    def __init__(self, inner: Callable[..., Any], group: Group, dtype: torch.dtype) -> None:
        self._inner, self._group, self._dtype = inner, group, dtype
        self._cuts: list[Cut | None] = []
        self._cut: Cut | None = None

    def __call__(self, *inputs: Any, **options: Any) -> Tensor:
        tensors = [x for x in (*inputs, *options.values()) if isinstance(x, Tensor)]
        if tensors and tensors[0].is_meta:
            self._cuts = [None if self._group.size == 1 or cut_of(x) is UNMARKED else cut_of(x) for x in tensors]
            self._cut = next(filter(None, self._cuts), None)
        cuts = iter(self._cuts)
        with untracked():
            given, named = tree_map_only(Tensor, lambda x: self._gathered(x, cuts), (inputs, options))
            y = self._inner(*given, **named)
            if not isinstance(y, Tensor):
                raise MixedChannels(f"it gives a {type(y).__name__}; what is whole inside a cut layer gives one tensor")
            if self._cut is None:
                return mark_replicated(y)
            cut = Cut(self._cut.dim)
            if y.ndim <= cut.dim:
                raise MixedChannels(f"it gives {list(y.shape)}, without the dimension {cut.dim} that is cut")
            if y.shape[cut.dim] % self._group.size:
                return mark_replicated(y)
            return mark_cut(_along(own_channels, y, cut, self._group), cut)

    def _gathered(self, x: Tensor, cuts: Any) -> Tensor:
        cut = next(cuts)
        x = x.to(self._dtype) if x.is_floating_point() else x
        return x if cut is None else _along(gather_alike, x, cut, self._group)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Gathered:
        return self  # a process group cannot be copied


def _along(move: Callable[[Tensor, Group], Tensor], x: Tensor, cut: Cut, group: Group) -> Tensor:
    """`gather_alike` or `own_channels` along another dimension than the third, each block of it by itself."""
    first = x.movedim(cut.dim, 0)
    moved = move(first.reshape(cut.blocks, 1, len(first) // cut.blocks, -1), group)  # [blocks, 1, C, others]
    return moved.reshape(-1, *first.shape[1:]).movedim(0, cut.dim)


# --- torch.compile


def compiling_itself(module: nn.Module) -> nn.Module:
    """The modules that torch.compile wrapped, which then compile their own call: names stay as they were."""
    inner: Any = getattr(module, "_orig_mod", None)
    if inner is not None:
        compiler: Any = module.dynamo_ctx
        inner._compiled_call_impl = compiler(inner._call_impl)
        return compiling_itself(inner)
    for name, child in module.named_children():
        setattr(module, name, compiling_itself(child))
    return module


@contextmanager
def uncompiled_in_dry_runs(layer: nn.Module, x: Tensor) -> Iterator[None]:
    """Keeps a dry run from compiling anything."""
    compiled = [each for each in layer.modules() if each._compiled_call_impl is not None] if x.is_meta else []
    kept = [each._compiled_call_impl for each in compiled]
    for each in compiled:
        each._compiled_call_impl = None
    try:
        yield
    finally:
        for each, call in zip(compiled, kept, strict=True):
            each._compiled_call_impl = call
