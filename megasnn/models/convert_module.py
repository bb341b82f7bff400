"""Conversion for tensor parallelism: a network of torch's and SpikingJelly's layers becomes one of ours.

What treats every channel by itself stays as it is, and works on a rank's channels. What is in the table of
`megasnn.layers.converted` becomes a layer of ours. A module with a forward of its own keeps it, with its parts
replaced. Anything else is whole on every tensor parallel rank: its input is gathered. What fits none of that is
refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from megasnn.layers import converted
from megasnn.layers.context import BuildContext, context_for, is_building
from megasnn.layers.conv import ParallelConv, cheaper_style
from megasnn.layers.converted import CONVERSIONS, ConvertedTemporalBatchNorm, class_name, is_multi_step, spec_of
from megasnn.layers.init import (
    ModuleInitialiser,
    note_paths,
    own_tensors,
    tensors_of,
    where_values_are,
    without_values,
)
from megasnn.layers.linear import ParallelLinear
from megasnn.layers.plain import (
    SHARDED,
    STEPPING,
    fold_time,
    is_channelwise,
    refuse_alone,
    refuse_what_differs,
    stepped_inside,
)
from megasnn.layers.replicated import call_as_sharded, gather_inside
from megasnn.models.layer import Layer, require_module

_REFUSED = "refused: "
_CONTAINERS = ("Sequential", "ModuleList", "ModuleDict", "SeqToANNContainer")


@dataclass(frozen=True)
class Fate:
    """Outcome of a conversion.

    Attributes:
        name: its place in the network. kind: its class.
        became: a class of ours and how it is cut, or why it is whole, or why it is refused.
        refused: whether the network cannot be used because of it.
    """

    name: str
    kind: str
    became: str
    refused: bool = False


def shard(module: nn.Module, *, initialise: ModuleInitialiser | None = None) -> Sharded:
    """Makes tensor parallel layers of a network of torch's and SpikingJelly's, which itself stays as it is.

        yield from megasnn.shard(net)                          # an nn.Sequential: a layer of each module in it
        yield layer("stage1", megasnn.shard(resnet.layer1))    # any module: one layer
        print(megasnn.shard(net))                              # what each layer becomes, or why not

    Tensors keep the names that they have in the network.

    Args:
        initialise: sets initial values of a plain layer, after its own `reset_parameters`; called with every one.
    Raises:
        ValueError: something else than a module.
    """
    require_module("megasnn.shard", module)
    return Sharded(module, initialise)


class Sharded:
    """A network given to `shard`. Iterating over it yields the layers of an nn.Sequential, for `layers` of a model.

    Raises (when it is used, not when it is printed):
        ValueError: with name and reason of every layer that is refused; a network with values, made outside `layers`.
    """

    def __init__(self, network: nn.Module, initialise: ModuleInitialiser | None) -> None:
        self._network, self._initialise = network, initialise

    @property
    def report(self) -> tuple[Fate, ...]:
        """Outcome for each layer on this rank."""
        walk = self._walk()
        self._parts(walk) if _is_flat(self._network) else walk.layer_of(self._copy(), "")
        return tuple(walk.fates)

    def as_layer(self, name: str) -> tuple[nn.Module, ModuleInitialiser | None]:
        """The network as one layer of this name, and what initialises it where it is whole."""
        walk = self._walk(name)
        made = walk.layer_of(self._copy(), "")
        self._refuse(walk)
        return made

    def __iter__(self) -> Iterator[Layer]:
        if not _is_flat(self._network):
            raise ValueError(
                f'{type(self._network).__name__} has a forward of its own, or hooks, and is one layer: yield layer("a '
                'name", megasnn.shard(...)), or give shard an nn.Sequential of its parts'
            )
        walk = self._walk()
        parts = self._parts(walk)
        self._refuse(walk)
        for name, (made, initialise) in parts:
            yield Layer(name, made, name, initialise=initialise)

    def __str__(self) -> str:
        rows = [(fate.name or "(itself)", fate.kind, fate.became) for fate in self.report]
        name, kind = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
        return "\n".join(f"{row[0]:{name}}  {row[1]:{kind}}  {row[2]}" for row in rows)

    def _copy(self) -> nn.Module:
        if is_building() and (where := where_values_are(self._network)):
            raise ValueError(f"{where}; weights are loaded with --load")
        for name, parameter in self._network.named_parameters():
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise ValueError(f"{name} has a hook, which would not see the gradient: put it on a module")
        for name, each in self._network.named_modules():
            lazy = isinstance(each, nn.modules.lazy.LazyModuleMixin)
            if lazy:  # it has no shapes yet, and cannot be copied
                refuse_alone(f"{name} ({type(each).__name__})", each)
            if isinstance(each, SHARDED):
                raise ValueError(f"{name or 'this'} is a {type(each).__name__}, cut already; shard is for plain layers")
            if hasattr(each, "_orig_mod") or each._compiled_call_impl is not None:
                raise ValueError(
                    f"{name or 'the network'} is compiled: torch.compile is for plain layers, which are whole"
                )
        if is_building():
            self._refuse_twice()
        copied = without_values(self._network)
        note_paths(copied)
        return copied

    def _refuse_twice(self) -> None:
        """Raises ValueError for a network, or a part of one, that is given to `shard` again: the two would learn by
        themselves."""
        for name, each in self._network.named_modules():
            if next(own_tensors(each), None) is not None:
                if vars(each).get("_is_given_to_shard"):
                    raise ValueError(f"{name or 'the network'} ({type(each).__name__}): give it to shard once")
                vars(each)["_is_given_to_shard"] = True

    def _walk(self, layer: str = "") -> _Walk:
        context = context_for(None)
        if not is_building():  # a report alone: of the number of time steps that the network has
            modules: list[Any] = list(self._network.modules())
            norms = [each for each in modules if CONVERSIONS.get(class_name(each) or "") is ConvertedTemporalBatchNorm]
            context = replace(context, time_steps=max((len(each.scale) for each in norms), default=1))
        return _Walk(context, self._initialise, layer)

    def _parts(self, walk: _Walk) -> list[tuple[str, tuple[nn.Module, ModuleInitialiser | None]]]:
        return [(name, walk.layer_of(each, name)) for name, each in _flat(self._copy(), "")]

    def _refuse(self, walk: _Walk) -> None:
        refused = [
            f"{fate.name or 'the network'} ({fate.kind}): {fate.became.removeprefix(_REFUSED)}"
            for fate in walk.fates
            if fate.refused
        ]
        if refused:
            raise ValueError(f"megasnn.shard refuses {'; '.join(refused)}")


def _is_flat(module: nn.Module) -> bool:
    """Tells whether it is no more than a sequence of its modules."""
    hooks = [value for name, value in vars(module).items() if name.endswith("_hooks")]
    return type(module) is nn.Sequential and not any(hooks)


def _flat(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():
        if child is not None:
            place = _join(path, name)
            yield from _flat(child, place) if _is_flat(child) else [(place, child)]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class _Walk:
    """Goes through a copy of a network, and replaces what has to be.

    Attributes:
        fates: what became of each layer so far.
    """

    def __init__(self, context: BuildContext, initialise: ModuleInitialiser | None, layer: str) -> None:
        self._context, self._initialise, self._layer = context, initialise, layer
        self._stepped = set[nn.Module]()
        self._seen: dict[int, tuple[str, nn.Parameter]] = {}  # by identity, which holds as long as they live
        self.fates: list[Fate] = []

    def layer_of(self, module: nn.Module, path: str) -> tuple[nn.Module, ModuleInitialiser | None]:
        """A whole layer of a model, and what initialises it where it stays plain."""
        self._stepped |= stepped_inside(module)
        if self._refused(module, path):
            return module, None
        folded, why = fold_time(module), self._why_whole(module, path)
        if why is not None:
            try:
                refuse_what_differs(module)
                self._tell(path, module, f"whole on every rank: {why}")
            except ValueError as error:
                self._tell(path, module, str(error), refused=True)
            return module, self._initialise
        return call_as_sharded(self._converted(module, path), self._context, folded=folded), None

    def _converted(self, module: nn.Module, path: str) -> nn.Module:
        """A part of a layer, replaced where it has to be; what is refused stays as it is, and is told."""
        if self._refused(module, path):
            return module
        try:
            return self._replaced(module, path)
        except ValueError as error:
            self._tell(path, module, str(error), refused=True)
            return module

    def _replaced(self, module: nn.Module, path: str) -> nn.Module:
        why = self._why_whole(module, path)
        if why is not None:
            whole = gather_inside(module, self._context, self._initialise)
            self._tell(path, module, f"whole on every rank: {why}")
            return whole
        conversion = self._conversion(module)
        if conversion is not None:
            ours = converted.convert(module, conversion, self._context, self._initialise)
            self._tell(path, module, _how_cut(ours))
            return ours
        children = [(name, child) for name, child in module._modules.items() if child is not None]
        is_node = hasattr(module, "surrogate_function") and next(tensors_of(module), None) is None
        if not children or is_node:
            self._tell(path, module, "as it is, on a rank's channels")
            return module
        if class_name(module) not in _CONTAINERS:
            self._tell(path, module, "its own forward, with its parts replaced")
        for name, child in children:
            module._modules[name] = self._converted(child, _join(path, name))
        return module

    def _conversion(self, module: nn.Module) -> Any:
        """Class that the table has for it; None where it is computed by itself, as a neuron that none of ours
        computes."""
        conversion = CONVERSIONS.get(class_name(module) or "")
        is_node = hasattr(module, "surrogate_function")
        return None if conversion is None or is_node and spec_of(module) is None else conversion

    def _why_whole(self, module: nn.Module, path: str) -> str | None:
        """Why a module cannot be cut, and its input is gathered; None where it can."""
        if ".".join(filter(None, (self._layer, path))) in self._context.replicated:
            return "it mixes channels"
        size = self._context.tp.size
        if self._conversion(module) is not None:
            for name, channels in _sizes_that_are_cut(module):
                if channels % size:
                    return f"{name} {channels} does not divide by --tensor-model-parallel-size {size}"
            if isinstance(module, nn.modules.conv._ConvNd) and (why := _why_other_padding(module)):
                return why
            groups = getattr(module, "groups", 1)
            return f"{groups} groups, --tensor-model-parallel-size {size}" if groups > 1 and groups % size else None
        if next(own_tensors(module), None) is not None:
            return "it has tensors of its own, and is not in the table"
        if class_name(module) == "VotingLayer":
            return "it joins neighbouring channels"
        if class_name(module) in STEPPING:
            return "it calls its parts at every time step"
        is_torchs = type(module).__module__.startswith("torch.nn.")
        if is_torchs and not is_channelwise(module) and class_name(module) not in _CONTAINERS:
            return "it may mix channels"
        return None

    def _refused(self, module: nn.Module, path: str) -> bool:
        """Tells whether a module can be computed alike on every layout neither cut nor whole; tells why."""
        try:
            refuse_alone("it", module, may_draw=self._conversion(module) is not None)
            for name, parameter in module.named_parameters(recurse=False):
                first, _ = self._seen.setdefault(id(parameter), (_join(path, name), parameter))
                if first != _join(path, name):
                    raise ValueError(f"its {name} is that of {first}: weights at two places are not supported")
            if getattr(module, "return_indices", False):
                raise ValueError("it returns indices besides its output")
            has_state = callable(getattr(module, "reset", None)) and hasattr(module, "step_mode")
            if has_state and not is_multi_step(module) and module not in self._stepped:
                raise ValueError("it is in step mode 's': layers take all time steps at once, so give step_mode='m'")
        except ValueError as error:
            self._tell(path, module, str(error), refused=True)
            return True
        return False

    def _tell(self, path: str, module: nn.Module, became: str, refused: bool = False) -> None:
        self.fates.append(Fate(path, type(module).__name__, f"{_REFUSED}{became}" if refused else became, refused))


def _why_other_padding(conv: nn.modules.conv._ConvNd) -> str | None:
    """The padding of a convolution that ours has not: other values than zeros, or more behind than before."""
    if conv.padding_mode != "zeros":
        return f"padding_mode {conv.padding_mode!r}"
    uneven = any(step * (size - 1) % 2 for size, step in zip(conv.kernel_size, conv.dilation, strict=True))
    return "padding 'same' of an even kernel" if conv.padding == "same" and uneven else None


def _sizes_that_are_cut(module: Any) -> Iterator[tuple[str, int]]:
    """Sizes of a layer in the table that ranks share out."""
    for name in ("out_channels", "in_features", "num_features"):
        if hasattr(module, name):
            yield name, getattr(module, name)
    if hasattr(module, "in_channels") and cheaper_style(module.in_channels, module.out_channels) == "row":
        yield "in_channels", module.in_channels


def _how_cut(ours: nn.Module) -> str:
    kind = next(each for each in type(ours).__mro__ if each.__module__ != converted.__name__)
    if isinstance(ours, ParallelConv):
        style = "row" if ours.plan.scatter else "column" if ours.plan.gather else "by groups"
    else:
        style = ours.style if isinstance(ours, ParallelLinear) else ""
    return f"{kind.__name__}, cut by channel{style and ', '}{style}"
