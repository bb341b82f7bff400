"""Conversion for tensor parallelism: a network of torch's and SpikingJelly's layers becomes one of ours.

What is in the table of `megasnn.layers.converted` becomes a layer of ours, cut by channel. What has tensors and is not
in the table is whole on every tensor parallel rank: its input is gathered. Anything else works on a rank's channels,
with its parts replaced, and is whole where that would compute something else (`megasnn.models.cut_check`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import nn

from megasnn.layers.context import BuildContext, context_for, is_building
from megasnn.layers.conv import ParallelConv, cheaper_style
from megasnn.layers.converted import class_name, convert, in_table, is_multi_step, spec_of
from megasnn.layers.init import ModuleInitialiser, note_paths, own_tensors, tensors_of, without_values
from megasnn.layers.linear import ParallelLinear
from megasnn.layers.refusals import SEQUENCES, is_stateful, note_stepped, place_of, problem_of, refuse
from megasnn.layers.replicated import LayerCall, as_layer, folds_time, is_whole, replicate
from megasnn.models.layer import Layer, require_module

_CONTAINERS = ("Sequential", "ModuleList", "ModuleDict", "SeqToANNContainer")


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
    return Sharded(require_module("megasnn.shard", module), initialise)


@dataclass(frozen=True)
class Sharded:
    """A network given to `shard`, which layers are made of when a model is built.

    Raises (when it is used, not when it is printed):
        ValueError: a network with values, made outside `layers`; one that cannot be given to layers.
    """

    network: nn.Module
    initialise: ModuleInitialiser | None

    def give(self) -> nn.Module:
        """The network, for a layer or several, which no others may have."""
        refuse(self.network, "shard", *(["given"] if is_building() else []))
        _refuse_shared(self.network)
        for each in self.network.modules():
            if is_building() and next(own_tensors(each), None) is not None:
                vars(each)["_is_given"] = True
        return self.network

    def __iter__(self) -> Iterator[Layer]:
        if not _is_flat(self.network):
            raise ValueError(
                f'{type(self.network).__name__} has a forward of its own, or hooks, and is one layer: yield layer("a '
                'name", megasnn.shard(...)), or give shard an nn.Sequential of its parts'
            )
        for path, part in _flat(self.give(), ""):
            yield Layer(path, part, path, self.initialise, is_sharded=True)

    def __str__(self) -> str:
        copied, context = without_values(self.network), context_for(None)
        rows: list[tuple[str, str, str]] = []
        for path, part in _flat(copied, "") if _is_flat(copied) else [("", copied)]:
            note_stepped(part)
            _Conversion(context, self.initialise, frozenset(), rows).converted(part, path)
        name, kind = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
        return "\n".join(f"{row[0]:{name}}  {row[1]:{kind}}  {row[2]}" for row in rows)


def _refuse_shared(network: nn.Module) -> None:
    """Raises ValueError for weights, and for neurons, at two places."""
    places: dict[object, str] = {}
    for path, module in network.named_modules(remove_duplicate=False):
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        for name, each in chain(own, [("", module)] if is_stateful(module) else []):
            place = _join(path, name)
            if (first := places.setdefault(each, place)) != place:
                raise ValueError(f"{place} is that of {first}: weights or neurons at two places are not supported")


def _is_flat(module: nn.Module) -> bool:
    """Tells whether it is no more than a sequence of its modules."""
    hooks = [value for name, value in vars(module).items() if name.endswith("_hooks")]
    return type(module) is nn.Sequential and not any(hooks)


def _flat(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():  # a module may stand at two places
        if child is not None:
            place = _join(path, name)
            yield from _flat(child, place) if _is_flat(child) else [(place, child)]


def _join(*parts: str) -> str:
    return ".".join(filter(None, parts))


def convert_network(each: Layer, context: BuildContext, whole: frozenset[str], classes: int) -> nn.Module:
    """Makes a layer of a copy of a network that was given to `shard`.

    Args:
        whole: paths of modules, with the layer's name, that are whole because they mix channels.
        classes: of the last layer of a model; 0 of others.
    Raises:
        ValueError: a module that cannot be computed alike on every layout neither cut nor whole.
    """
    network = without_values(each.module)
    note_paths(network)
    note_stepped(network)
    fold = folds_time(network)
    inside = frozenset(path.removeprefix(each.name).removeprefix(".") for path in whole)
    conversion = _Conversion(context, each.initialise, inside, dim=None if classes else 1 if fold else 2)
    made = conversion.converted(network, "")
    dtype = context.dtype if is_whole(made) else None
    return as_layer(made, each.name, context, LayerCall(context.tp, context.time_steps, fold, dtype, classes))


class _Conversion:
    """Conversion of a copy of a network.

    Args:
        whole: paths of modules that are whole because they mix channels.
        rows: gets (path, class, what it becomes), where refusals are to be told rather than raised.
        dim: in which the output of the network is cut where it is whole.
    """

    def __init__(
        self,
        context: BuildContext,
        initialise: ModuleInitialiser | None,
        whole: frozenset[str],
        rows: list[tuple[str, str, str]] | None = None,
        dim: int | None = None,
    ) -> None:
        self._context, self._initialise, self._whole, self._rows = context, initialise, whole, rows
        self._dim = dim
        self._made: dict[nn.Module, nn.Module] = {}

    def converted(self, module: nn.Module, path: str) -> nn.Module:
        """The module that one becomes: itself, with its parts replaced, or another one."""
        if module in self._made:
            return self._made[module]
        try:
            made, text = self._decided(module, path)
        except ValueError as error:
            if self._rows is None:
                raise ValueError(f"{place_of(path, module)}: {error}") from error
            made, text = nn.Identity(), f"refused: {error}"  # the report does not look into it
        self._made[module] = made
        if text and self._rows is not None:
            self._rows.append((path or "(itself)", type(module).__name__, text))
        if made is module and not is_whole(module) and not _is_leaf(module):
            for name, child in module._modules.items():
                module._modules[name] = None if child is None else self.converted(child, _join(path, name))
        return made

    def _decided(self, module: nn.Module, path: str) -> tuple[nn.Module, str]:
        """A module by itself or what replaces it, and in words how, but for containers."""
        conversion = _conversion_of(module)
        if problem := problem_of(module, "kept" if conversion is None else "cut"):
            raise ValueError(f"it {problem}")
        if why := "it mixes channels" if path in self._whole else _why_whole(module, self._context.tp.size):
            whole = replicate(module, self._context, self._initialise, None if path else self._dim)
            return whole, f"whole on every rank: {why}"
        if conversion is not None:
            ours = convert(module, conversion, self._context, self._initialise)
            return ours, _how_cut(ours)
        if _is_leaf(module):
            return module, "as it is, on a rank's channels"
        return module, "" if class_name(module) in _CONTAINERS else "its own forward, with its parts replaced"


def _is_leaf(module: nn.Module) -> bool:
    is_node = hasattr(module, "surrogate_function") and next(tensors_of(module), None) is None
    return is_node or next(module.children(), None) is None


def _conversion_of(module: nn.Module) -> Any:
    """Conversion that the table has; None where a module is computed by itself, as a neuron that none of ours
    computes."""
    is_node = hasattr(module, "surrogate_function")
    return None if is_node and (not is_multi_step(module) or spec_of(module) is None) else in_table(module)


def _why_whole(module: nn.Module, size: int) -> str | None:
    """Reason why a module cannot be cut over so many ranks, and its input is gathered; None where it can."""
    if isinstance(module, SEQUENCES):
        return "its parts are not always called one by one"  # in evaluation one kernel of torch's computes it
    if _conversion_of(module) is None:
        has_tensors = next(own_tensors(module), None) is not None
        return "it has tensors of its own, and is not in the table" if has_tensors else None
    for name, channels in _sizes_that_are_cut(module):
        if channels % size:
            return f"{name} {channels} does not divide by --tensor-model-parallel-size {size}"
    if isinstance(module, nn.modules.conv._ConvNd) and (why := _why_other_padding(module)):
        return why
    groups = getattr(module, "groups", 1)
    return f"{groups} groups, --tensor-model-parallel-size {size}" if groups > 1 and groups % size else None


def _why_other_padding(conv: nn.modules.conv._ConvNd) -> str | None:
    """Padding of a convolution that ours has not: other values than zeros, or more behind than before."""
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
