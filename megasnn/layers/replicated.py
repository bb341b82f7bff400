"""Replicated modules: any `nn.Module` without sharded layers in it is a layer, whole on every tensor parallel rank.

Between layers activations are cut by channel. A plain module's input is gathered, every rank computes the same, and
each keeps its own channels of the output. So its weights have the same gradients on every rank, and nothing is summed.
A layer without tensors that computes the same with a rank's channels (`megasnn.models.cut_check`) is not gathered.

A module whose class is one of torch.nn, or a Sequential of such, knows no time: it is given `[T * N, C, ...]`. Any
other module is given `[T, N, C, ...]`. Those of SpikingJelly must be in step mode "m", and forget their state before
each micro-batch, or detach it before one that is a later window of the same samples. A plain module may also stand
inside a layer whose other parts are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from megasnn.bundle import Bundle, entries_of, map_entries, plain_bundle
from megasnn.layers.context import BuildContext
from megasnn.layers.converted import ConvertedDropout, convert, our_batch_norm, spec_of
from megasnn.layers.dropout import drawing_for
from megasnn.layers.init import ModuleInitialiser, initializer_from_module, note_paths, own_tensors, to_meta
from megasnn.layers.norm import ParallelBatchNorm
from megasnn.layers.refusals import SEQUENCES, is_stateful, note_stepped, refuse
from megasnn.layers.shape_inference import mark_spikes
from megasnn.parallel.collectives import gather_alike, own_channels
from megasnn.parallel.sharding import Cut, describe_tensor
from megasnn.parallel_state import Group


class Gathered:
    """Forward of a module that every rank has whole: its inputs are gathered, and a rank keeps its part of the output.

    An output that does not divide by the ranks stays whole.

    Attributes:
        dim: in which the output is cut; None for whole.
        cuts: of the input's tensors, in their order; those that are missing are whole. The check of cut layers finds
            them, and `dim` of a module inside a layer: that of its first input that is cut.
    """

    def __init__(self, inner: Callable[..., Any], context: BuildContext, dim: int | None = None) -> None:
        self._inner, self._group, self._dtype = inner, context.tp, context.dtype
        self.dim = dim
        self.cuts: Sequence[Cut | None] = ()

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        cuts = chain(self.cuts, repeat(None))
        given, named = tree_map_only(Tensor, lambda x: self._whole(x, next(cuts)), (inputs, options))
        output = self._inner(*given, **named)
        if self.dim is None or self._group.size == 1:
            return output
        return tree_map_only(Tensor, partial(self._own, self.dim), output)

    def _whole(self, x: Tensor, cut: Cut | None) -> Tensor:
        x = x.to(self._dtype) if x.is_floating_point() else x
        return x if cut is None else _along(gather_alike, x, cut, self._group)

    def _own(self, dim: int, y: Tensor) -> Tensor:
        if y.ndim <= dim or y.shape[dim] % self._group.size:
            return y
        return _along(own_channels, y, Cut(dim), self._group)


def _along(move: Callable[[Tensor, Group], Tensor], x: Tensor, cut: Cut, group: Group) -> Tensor:
    """`gather_alike` or `own_channels` along any dimension, each block of it by itself."""
    blocks = x.unflatten(cut.dim, (cut.blocks, -1)).movedim(cut.dim, 0)
    moved = move(blocks.reshape(cut.blocks, -1, *blocks.shape[cut.dim + 1 :]), group)  # [blocks, others, C, space]
    return (
        moved.reshape(*blocks.shape[: cut.dim + 1], *moved.shape[2:]).movedim(0, cut.dim).flatten(cut.dim, cut.dim + 1)
    )


def is_whole(module: nn.Module) -> bool:
    """Tells whether every rank has a module whole where it stands."""
    return isinstance(vars(module).get("forward"), Gathered)


def replicate(
    module: nn.Module, context: BuildContext, initialise: ModuleInitialiser | None, dim: int | None = None
) -> nn.Module:
    """Makes a plain module on the meta device whole on every rank: describes its tensors, and swaps its batch norms for
    ours.

    Args:
        initialise: called with each of its modules, after their own `reset_parameters`, to set initial values.
        dim: as of `Gathered`.
    Returns:
        the module itself, or what it is swapped for.
    Raises:
        ValueError: what cannot be computed alike on every layout.
    """
    refuse(module, "plain")
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
    module.forward = Gathered(module.forward, context, dim)
    return module


def _with_our_norms(module: nn.Module, context: BuildContext, initialise: ModuleInitialiser | None) -> nn.Module:
    """The module with its batch norms swapped, each at all places where it stands, or what it is swapped for."""
    norms = {
        each: convert(each, conversion, context, initialise, True)
        for each in module.modules()
        if (conversion := our_batch_norm(each)) is not None
    }
    for each in [*module.modules()]:
        for name, child in each._modules.items():
            each._modules[name] = child if child is None else norms.get(child, child)
    return norms.get(module, module)


# --- layers


@dataclass(frozen=True)
class LayerCall:
    """Way in which a layer that knows nothing of ranks is called.

    Attributes:
        time_steps: that an input of a single one stands for.
        fold_time: whether it is given all time steps as one batch.
        dtype: of its input; None for what comes.
        classes: of the last layer, whose output is gathered to so many channels; 0 of all others.
    """

    group: Group
    time_steps: int
    fold_time: bool
    dtype: torch.dtype | None = None
    classes: int = 0

    def given(self, x: Tensor) -> Tensor:
        """Input of the layer."""
        if x.ndim < 3:
            return x
        if len(x) == 1 < self.time_steps:
            x = x.expand(self.time_steps, *x.shape[1:])
        x = x.to(self.dtype) if self.dtype is not None and x.is_floating_point() else x
        return x.flatten(0, 1) if self.fold_time else x

    def taken(self, y: Tensor, frames: tuple[int, ...]) -> Tensor:
        """Output of the layer, of so many time steps and samples."""
        y = y.unflatten(0, frames) if self.fold_time else y
        is_cut = y.ndim > 2 and y.shape[2] < self.classes == y.shape[2] * self.group.size
        return gather_alike(y, self.group) if is_cut else y


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
    classes: int = 0,
) -> nn.Module:
    """Makes a layer of a plain module: `whole` on every rank, or on a rank's channels.

    Args:
        name: global name. classes: of the last layer of a model.
    Raises:
        ValueError: what cannot be computed alike on every layout.
    """
    note_paths(module)
    note_stepped(module)
    refuse(module, "plain")
    fold = folds_time(module)
    if whole:
        module = replicate(module, context, initialise, None if classes else 1 if fold else 2)
    return as_layer(module, name, context, LayerCall(context.tp, context.time_steps, fold, context.dtype, classes))


def as_layer(module: nn.Module, name: str, context: BuildContext, call: LayerCall) -> nn.Module:
    """Makes a layer of a module that knows nothing of ranks. Raises ValueError for state that cannot be detached."""
    if context.carries:
        refuse(module, "carries")
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
            plain: Bundle = plain_bundle(layer(x, *more))
        return plain
    first = next(iter(entries_of(x).values()))
    frames = (call.time_steps if len(first) == 1 else len(first), *first.shape[1:2])
    for each in layer.modules():
        if is_stateful(each):
            each.detach() if goes_on else each.reset()  # type: ignore[operator]
    with drawing_for(samples, frames):
        output = plain_bundle(layer(*(map_entries(call.given, each) for each in (x, *more))))
    return map_entries(lambda y: call.taken(y, frames), output)
