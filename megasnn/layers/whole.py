"""Plain modules as layers: any `nn.Module` without sharded layers in it is whole on every tensor parallel rank.

Between layers activations are cut by channel. A plain module's input is gathered, every rank computes the same, and
each keeps its own channels of the output. So its weights have the same gradients on every rank, and nothing is summed.
What treats every channel by itself (pooling, activation functions) stays cut.

A module whose class is one of torch.nn, or a Sequential of such, knows no time: it is given `[T * N, C, ...]`. Any
other module is given `[T, N, C, ...]`. Those of SpikingJelly must be in step mode "m", and forget their state before
each micro-batch, or detach it before one that is a later window of the same samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase
from torch.nn.modules.dropout import _DropoutNd

from megasnn.bundle import Bundle, entries_of, map_entries
from megasnn.comm.collectives import gather_alike, own_channels
from megasnn.comm.group import Group
from megasnn.layers.batch_norm import ParallelBatchNorm
from megasnn.layers.channels import all_channels
from megasnn.layers.context import BuildContext
from megasnn.layers.conv import ParallelConv
from megasnn.layers.keyed import KeyedLayer
from megasnn.layers.linear import ParallelLinear
from megasnn.layers.neuron import NeuronLayer
from megasnn.sharding import describe_tensor, is_described

ModuleInitialiser = Callable[[nn.Module], None]

SHARDED = (ParallelConv, ParallelLinear, ParallelBatchNorm, NeuronLayer, KeyedLayer)
_CHANNELWISE = (
    *(nn.AvgPool2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
    *(nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Hardtanh),
)
_SPIKINGJELLYS_NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")


def is_plain(module: nn.Module) -> bool:
    """Whether there is no sharded layer in a module."""
    return not any(isinstance(each, SHARDED) or is_described(each) for each in module.modules())


def make_whole(
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
    _refuse(module)
    if context.carries:
        _refuse_attached(module)
    knows_no_time = all(type(each).__module__.startswith("torch.nn.") for each in module.modules())
    stays_cut = knows_no_time and not (first or last) and all(_is_channelwise(each) for each in module.modules())
    module = _with_our_norms(module, context)
    for each in module.modules():
        if isinstance(each, ParallelBatchNorm):
            continue
        for name, tensor in _own_tensors(each):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(context.dtype)
            shard = context.shard(tuple(tensor.shape), initialise=partial(_fresh, each, name, initialise))
            describe_tensor(each, name, shard)
    vars(module)["_whole"] = _Whole(
        context.tensor,
        context.time_steps,
        context.dtype,
        folds=knows_no_time,
        gathers=not first and not stays_cut,
        cuts=not last and not stays_cut,
    )
    return module


def is_whole(module: nn.Module) -> bool:
    """Whether `make_whole` made this layer."""
    return "_whole" in vars(module)


def call_whole(layer: nn.Module, *inputs: Bundle, goes_on: bool = False) -> Bundle:
    """Calls a layer that `make_whole` made on a micro-batch.

    Args:
        goes_on: see `apply_layer`.
    Raises:
        ValueError: an output without channels, or with channels that do not divide by the number of tensor parallel
            ranks.
    """
    how: _Whole = vars(layer)["_whole"]
    for each in layer.modules():
        if _is_stateful(each):
            each.detach() if goes_on else each.reset()  # type: ignore[operator]
    first = next(iter(entries_of(inputs[0]).values()))
    module = getattr(layer, "_orig_mod", layer) if first.is_meta else layer  # a dry run compiles nothing
    taken = [how.taken(x) if isinstance(x, Tensor) else map_entries(how.taken_entry, x) for x in inputs]
    with all_channels():
        if how.folds:
            frames = (how.time_steps if len(first) == 1 else len(first), first.shape[1])
            y = module(*(map_entries(lambda x: x.flatten(0, 1), x) for x in taken))
            y = map_entries(lambda y: y.unflatten(0, frames), y)
        else:
            y = module(*taken)
        return map_entries(how.given, y) if how.cuts else y


def apply_layer(layer: nn.Module, x: Bundle, samples: range | None, *more: Bundle, goes_on: bool = False) -> Bundle:
    """Calls any layer of a model on a micro-batch `[T, N, ...]` of these samples.

    Args:
        x, more: the outputs that it takes.
        goes_on: whether it is a later window of the samples that the last call was on; then state is kept.
    """
    if is_whole(layer):
        return call_whole(layer, x, *more, goes_on=goes_on)
    output: Bundle = layer(x, *more, samples) if isinstance(layer, KeyedLayer) else layer(x, *more)
    return output


@dataclass(frozen=True)
class _Whole:
    """
    Attributes:
        folds: whether the module is given all time steps as one batch.
        gathers: whether the input is cut by channel, and made whole. cuts: the same of the output.
    """

    group: Group
    time_steps: int
    dtype: torch.dtype
    folds: bool
    gathers: bool
    cuts: bool

    def taken(self, x: Tensor) -> Tensor:
        """What the module is given for a tensor: all time steps and channels, in the type of its parameters."""
        if len(x) == 1 < self.time_steps:
            x = x.expand(self.time_steps, *x.shape[1:])
        x = x.to(self.dtype)
        return gather_alike(x, self.group) if self.gathers else x

    def taken_entry(self, x: Tensor) -> Tensor:
        """The same for an entry of a bundle: without channels it stays as it is, and whole numbers keep their type."""
        if x.ndim < 3:
            return x
        return self.taken(x) if x.is_floating_point() else replace(self, dtype=x.dtype).taken(x)

    def given(self, y: Tensor) -> Tensor:
        """This rank's channels of an output. Raises ValueError where they cannot be shared out."""
        if self.group.size > 1 and (y.ndim < 3 or y.shape[2] % self.group.size):
            what = (
                f"the {y.shape[2]} channels of" if y.ndim > 2 else "the channels (dimension 2), which are missing, of"
            )
            raise ValueError(
                f"{what} the output {list(y.shape)} do not divide by --tensor-model-parallel-size {self.group.size}"
            )
        return own_channels(y, self.group)


class WholeBatchNorm(ParallelBatchNorm):
    """In place of a batch norm of torch or SpikingJelly inside a plain module: statistics are merged once per step."""

    def __init__(self, norm: _BatchNorm, context: BuildContext) -> None:
        super().__init__(
            norm.num_features,
            context,
            eps=norm.eps,
            momentum=norm.momentum,
            affine=norm.affine,
            track_running_stats=norm.track_running_stats,
            whole=True,
        )
        self.time_steps = 1  # the input has all time steps
        self.multi_step = getattr(norm, "step_mode", "s") == "m"

    def forward(self, x: Tensor) -> Tensor:
        """`[N, C, ...]`, or `[T, N, C, ...]` where SpikingJelly's norm was in step mode "m"."""
        return super().forward(x) if self.multi_step else super().forward(x.unsqueeze(0)).squeeze(0)


def _refuse(module: nn.Module) -> None:
    if any(not tensor.is_meta for tensor in chain(module.parameters(), module.buffers())):
        raise ValueError(
            f"this {type(module).__name__} has values already: make modules in `layers`, as they are yielded"
        )
    for path, each in module.named_modules():
        what = f"{path or type(each).__name__} ({type(each).__name__})"
        _refuse_dropout(what, each)
        if isinstance(each, _BatchNorm) and not _is_known_norm(each):
            raise ValueError(f"{what} is a batch norm with a forward of its own, which ours would not have")
        if isinstance(each, nn.modules.instancenorm._InstanceNorm) and each.track_running_stats:
            raise ValueError(f"{what} keeps statistics of its own replica: give it track_running_stats=False")
        if isinstance(each, (_LazyNormBase, nn.modules.lazy.LazyModuleMixin)):
            raise ValueError(f"{what} does not say its sizes: use the module that is not lazy")
        if getattr(each, "step_mode", "m") != "m":
            raise ValueError(f"{what} is in step mode 's': layers take all time steps at once, so give step_mode='m'")
        unsaved = each._non_persistent_buffers_set
        if unsaved:
            raise ValueError(f"{what} has a buffer {min(unsaved)!r} that is not saved; register it as persistent")


def _is_stateful(module: nn.Module) -> bool:
    return callable(getattr(module, "reset", None)) and not isinstance(module, NeuronLayer)


def _refuse_attached(module: nn.Module) -> None:
    """Raises ValueError for modules that cannot keep their state without its history."""
    for path, each in module.named_modules():
        if _is_stateful(each) and not callable(getattr(each, "detach", None)):
            raise ValueError(
                f"{path or type(each).__name__} ({type(each).__name__}) has a `reset` but no `detach`, which "
                "--bptt-steps calls between the windows of a sample: give it one, as SpikingJelly's modules have"
            )


def refuse_plain_parts(module: nn.Module) -> None:
    """For a layer with sharded layers in it: raises ValueError for plain modules that work by themselves only."""
    for path, each in module.named_modules():
        what = f"{path} ({type(each).__name__})"
        _refuse_dropout(what, each)
        if isinstance(each, _BatchNorm):
            raise ValueError(f"{what} inside a layer of MegaSNN's layers: use megasnn.ParallelBatchNorm")
        if hasattr(each, "step_mode") and callable(getattr(each, "reset", None)):
            raise ValueError(
                f"{what} inside a layer of MegaSNN's layers keeps its state from one micro-batch to the next: use "
                "megasnn.ParallelNeuron, or make it a layer of its own"
            )


def _refuse_dropout(what: str, module: nn.Module) -> None:
    if (isinstance(module, _DropoutNd) or type(module).__name__ in ("Dropout", "Dropout2d")) and module.p:
        raise ValueError(f"{what} draws random numbers that depend on the layout: use megasnn.ParallelDropout(p, name)")


def _with_our_norms(module: nn.Module, context: BuildContext) -> nn.Module:
    if isinstance(module, _BatchNorm):
        return WholeBatchNorm(module, context)
    for name, child in module.named_children():
        setattr(module, name, _with_our_norms(child, context))
    return module


def _is_known_norm(norm: _BatchNorm) -> bool:
    """torch's, and SpikingJelly's that compute the same."""
    kind = type(norm)
    torchs = kind.__module__.startswith("torch.nn.")
    return torchs or (kind.__module__.startswith("spikingjelly.") and kind.__name__ in _SPIKINGJELLYS_NORMS)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(
        module.named_parameters(recurse=False, remove_duplicate=False),
        module.named_buffers(recurse=False, remove_duplicate=False),
    )


def _is_channelwise(module: nn.Module) -> bool:
    flattens = isinstance(module, nn.Flatten) and module.start_dim == 1
    return isinstance(module, (*_CHANNELWISE, nn.Sequential)) or flattens


def _fresh(
    module: nn.Module, name: str, initialise: ModuleInitialiser | None, tensor: Tensor, generator: torch.Generator
) -> None:
    """Fills a tensor with the initial values that the module's own `reset_parameters` gives it."""
    values = [_reset(module, mark, initialise, generator.initial_seed()) for mark in (87, 86)]
    of_first, of_second = (getattr(fresh, name) for fresh in values)
    if not torch.equal(of_first, of_second):  # what no function has set is what was put there before
        raise ValueError(
            f"nothing initialises {name!r} of {type(module).__name__}: values that its constructor sets are not kept; "
            "give the module a method reset_parameters that sets them, or the layer a function initialise=..."
        )
    tensor.copy_(of_first)


def _reset(module: nn.Module, mark: int, initialise: ModuleInitialiser | None, seed: int) -> nn.Module:
    """A copy with memory, all of it set to `mark` (bool: to whether it is odd) and then initialised."""
    fresh = copy.deepcopy(module)
    for each in fresh.modules():
        for name, value in list(_own_tensors(each)):
            memory = torch.full_like(value, mark % 2 if value.dtype == torch.bool else mark, device="cpu")
            if isinstance(value, nn.Parameter):
                each._parameters[name] = nn.Parameter(memory, value.requires_grad)
            else:
                each._buffers[name] = memory
    reset = getattr(fresh, "reset_parameters", None) or getattr(fresh, "_reset_parameters", None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if callable(reset):
            reset()
        if initialise is not None:
            fresh.apply(initialise)
    return fresh
