"""Conversion for tensor parallelism: a network of torch's and SpikingJelly's layers becomes one of ours.

What is in the table of `megasnn.layers.converted` becomes a layer of ours, cut by channel. What has tensors and is not
in the table is whole on every tensor parallel rank: its input is gathered. Anything else works on a rank's channels,
with its parts replaced, and is whole where that would compute something else (`megasnn.models.cut_check`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, cast

from torch import nn

from megasnn.layers.context import BuildContext, context_for, is_building
from megasnn.layers.conv import ParallelConv, cheaper_style
from megasnn.layers.converted import CONVERSIONS, class_name, convert, is_multi_step, spec_of, temporal_batch_norm
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
    SEQUENCES,
    SHARDED,
    fold_time,
    is_compiled,
    refuse_alone,
    refuse_what_differs,
    stepped_inside,
)
from megasnn.layers.replicated import as_layer, is_whole, replicate
from megasnn.models.layer import Layer, require_module

_CONTAINERS = ("Sequential", "ModuleList", "ModuleDict", "SeqToANNContainer")


class Fate(NamedTuple):
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
        return tuple(self._converted("", _is_flat(self._network))[0].fates)

    def as_layer(self, name: str) -> tuple[nn.Module, ModuleInitialiser | None]:
        """The network as one layer of this name, and what initialises it where it is whole."""
        conversion, (made,) = self._converted(name, False)
        conversion.refuse()
        return made.module, made.initialise

    def __iter__(self) -> Iterator[Layer]:
        if not _is_flat(self._network):
            raise ValueError(
                f'{type(self._network).__name__} has a forward of its own, or hooks, and is one layer: yield layer("a '
                'name", megasnn.shard(...)), or give shard an nn.Sequential of its parts'
            )
        conversion, layers = self._converted("", True)
        conversion.refuse()
        yield from layers

    def __str__(self) -> str:
        rows = [(fate.name or "(itself)", fate.kind, fate.became) for fate in self.report]
        name, kind = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
        return "\n".join(f"{row[0]:{name}}  {row[1]:{kind}}  {row[2]}" for row in rows)

    def _converted(self, layer: str, flat: bool) -> tuple[_Conversion, list[Layer]]:
        """Outcomes and layers: those of a sequence if `flat`, or else one."""
        copied, context = self._copy(), context_for(None)
        if not is_building():  # a report alone: of the number of time steps that the network has
            norms: list[Any] = [each for each in copied.modules() if _in_table(each) is temporal_batch_norm]
            context = replace(context, time_steps=max((len(each.scale) for each in norms), default=1))
        conversion = _Conversion(context, self._initialise, layer)
        parts = _flat(copied, "") if flat else [("", copied)]
        return conversion, [conversion.layer_of(each, path) for path, each in parts]

    def _copy(self) -> nn.Module:
        if is_building() and (where := where_values_are(self._network)):
            raise ValueError(f"{where}; weights are loaded with --load")
        for name, parameter in self._network.named_parameters():
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise ValueError(f"{name} has a hook, which would not see the gradient: put it on a module")
        for name, each in self._network.named_modules():
            what = f"{name or 'the network'} ({type(each).__name__})"
            if isinstance(each, nn.modules.lazy.LazyModuleMixin):  # it has no shapes yet, and cannot be copied
                refuse_alone(what, cast(nn.Module, each))
            if isinstance(each, SHARDED):
                raise ValueError(f"{name or 'this'} is a {type(each).__name__}, cut already; shard is for plain layers")
            if is_compiled(each):
                raise ValueError(f"{what} is compiled: give the module itself")
            if is_building() and next(own_tensors(each), None) is not None:
                if vars(each).get("_is_given_to_shard"):  # the two would learn by themselves
                    raise ValueError(f"{what}: give it to shard once")
                vars(each)["_is_given_to_shard"] = True
        copied = without_values(self._network)
        note_paths(copied)
        return copied


def _is_flat(module: nn.Module) -> bool:
    """Tells whether it is no more than a sequence of its modules."""
    hooks = [value for name, value in vars(module).items() if name.endswith("_hooks")]
    return type(module) is nn.Sequential and not any(hooks)


def _flat(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        place = _join(path, name)
        yield from _flat(child, place) if _is_flat(child) else [(place, child)]


def _join(*parts: str) -> str:
    return ".".join(filter(None, parts))


class _Conversion:
    """Conversion of a copy of a network.

    Args:
        layer: name of the layer that it is; empty where each part is one.
    Attributes:
        fates: what became of each module so far.
    """

    def __init__(self, context: BuildContext, initialise: ModuleInitialiser | None, layer: str) -> None:
        self._context, self._initialise, self._layer = context, initialise, layer
        self._stepped = set[nn.Module]()
        self._seen: dict[int, tuple[str, nn.Parameter]] = {}  # by identity, which holds as long as they live
        self.fates: list[Fate] = []

    def refuse(self) -> None:
        """Raises ValueError where a module was refused."""
        refused = [f"{each.name or 'the network'} ({each.kind}): {each.became}" for each in self.fates if each.refused]
        if refused:
            raise ValueError(f"megasnn.shard refuses {'; '.join(refused)}".replace("refused: ", ""))

    def layer_of(self, module: nn.Module, path: str) -> Layer:
        """A whole layer of a model; where it stays plain, with what initialises it."""
        self._stepped |= stepped_inside(module)
        folded, initialise = fold_time(module), None
        try:
            why = self._why_whole(module, path)
            if why is None:
                module = as_layer(self._replaced(module, path), self._context, folded)
            else:
                refuse_what_differs(module)
                self.fates.append(Fate(path, type(module).__name__, f"whole on every rank: {why}"))
                initialise = self._initialise
        except ValueError as error:
            self._refuse(module, path, error)
        return Layer(path, module, path, initialise)

    def _replaced(self, module: nn.Module, path: str) -> nn.Module:
        """A part of a layer, replaced where it has to be; what is refused stays as it is."""
        try:
            made, became = self._made(module, path)
        except ValueError as error:
            self._refuse(module, path, error)
            return module
        if became:
            self.fates.append(Fate(path, type(module).__name__, became))
        if made is module and not is_whole(module) and not _is_leaf(module):
            for name, child in module.named_children():
                module._modules[name] = self._replaced(child, _join(path, name))
        return made

    def _refuse(self, module: nn.Module, path: str, error: ValueError) -> None:
        self.fates.append(Fate(path, type(module).__name__, f"refused: {error}", refused=True))

    def _made(self, module: nn.Module, path: str) -> tuple[nn.Module, str]:
        """Replaces one module; tells in words how, but for containers. Raises ValueError for what cannot be computed
        alike on every layout."""
        why, conversion = self._why_whole(module, path), _conversion_of(module)
        if why is not None:
            return replicate(module, self._context, self._initialise), f"whole on every rank: {why}"
        if conversion is not None:
            ours = convert(module, conversion, self._context, self._initialise)
            return ours, _how_cut(ours)
        if _is_leaf(module):
            return module, "as it is, on a rank's channels"
        return module, "" if class_name(module) in _CONTAINERS else "its own forward, with its parts replaced"

    def _why_whole(self, module: nn.Module, path: str) -> str | None:
        """Why a module cannot be cut, and its input is gathered; None where it can. Raises as `_made`."""
        self._refuse_alone(module, path)
        if _join(self._layer, path) in self._context.replicated:
            return "it mixes channels"
        if isinstance(module, SEQUENCES):
            return "its parts are not always called one by one"  # in evaluation one kernel of torch's computes it
        if _conversion_of(module) is None:
            has_tensors = next(own_tensors(module), None) is not None
            return "it has tensors of its own, and is not in the table" if has_tensors else None
        size = self._context.tp.size
        for name, channels in _sizes_that_are_cut(module):
            if channels % size:
                return f"{name} {channels} does not divide by --tensor-model-parallel-size {size}"
        if isinstance(module, nn.modules.conv._ConvNd) and (why := _why_other_padding(module)):
            return why
        groups = getattr(module, "groups", 1)
        return f"{groups} groups, --tensor-model-parallel-size {size}" if groups > 1 and groups % size else None

    def _refuse_alone(self, module: nn.Module, path: str) -> None:
        """Raises ValueError for a module that can be computed alike on every layout neither cut nor whole."""
        refuse_alone("it", module, may_draw=_conversion_of(module) is not None)
        for name, parameter in module.named_parameters(recurse=False):
            first, _ = self._seen.setdefault(id(parameter), (_join(path, name), parameter))
            if first != _join(path, name):
                raise ValueError(f"its {name} is that of {first}: weights at two places are not supported")
        if getattr(module, "return_indices", False):
            raise ValueError("it returns indices besides its output")
        has_state = callable(getattr(module, "reset", None)) and hasattr(module, "step_mode")
        if has_state and not is_multi_step(module) and module not in self._stepped:
            raise ValueError("it is in step mode 's': layers take all time steps at once, so give step_mode='m'")


def _is_leaf(module: nn.Module) -> bool:
    is_node = hasattr(module, "surrogate_function") and next(tensors_of(module), None) is None
    return is_node or next(module.children(), None) is None


def _in_table(module: nn.Module) -> Any:
    return CONVERSIONS.get(class_name(module) or "")


def _conversion_of(module: nn.Module) -> Any:
    """Conversion that the table has; None where a module is computed by itself, as a neuron that none of ours
    computes."""
    is_node = hasattr(module, "surrogate_function")
    return None if is_node and (not is_multi_step(module) or spec_of(module) is None) else _in_table(module)


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
    style = ours.style if isinstance(ours, ParallelLinear) else ""
    if isinstance(ours, ParallelConv):
        style = "row" if ours.plan.scatter else "column" if ours.plan.gather else "by groups"
    return f"{type(ours).__name__}, cut by channel{style and ', '}{style}"
