"""Conversion for tensor parallelism: a network of torch's and SpikingJelly's layers becomes one of ours.

What is in the table of `megasnn.layers.plain.table` becomes a layer of ours, cut by channel. A network with something
else in it that has tensors, or may mix channels, is whole on every rank; so is one whose own forwards do more than
joining tensors element by element (`megasnn.layers.plain.by_channel`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from megasnn.layers.context import BuildContext, context_for, is_building
from megasnn.layers.init import ModuleInitialiser, own_tensors, tensors_of
from megasnn.layers.layer import Layer, LayerSource, require_initialiser, require_module
from megasnn.layers.plain.initial_values import without_values
from megasnn.layers.plain.layer_call import LayerCall
from megasnn.layers.plain.refusals import (
    SEQUENCES,
    is_by_channel,
    is_stateful,
    module_label,
    note_stepped,
    problem_of,
    require_supported,
)
from megasnn.layers.plain.replicated import as_layer, folds_time, plain_layer, swapped
from megasnn.layers.plain.table import Conversion, class_name, convert, in_table, is_multi_step, spec_of


def shard(module: nn.Module, *, initialise: ModuleInitialiser | None = None) -> Sharded:
    """Makes tensor parallel layers of a network of torch's and SpikingJelly's, which itself stays as it is.

        yield from megasnn.shard(net)                          # an nn.Sequential: a layer of each module in it
        yield layer("stage1", megasnn.shard(resnet.layer1))    # any module: one layer
        print(megasnn.shard(net))                              # what each layer becomes, or why not

    Tensors keep the names that they have in the network.

    Args:
        initialise: sets initial values of a plain layer, after its own `reset_parameters`; called with every one.
    Raises:
        ValueError: something else than a module, or `initialise` is no function of one module.
    """
    require_initialiser("megasnn.shard", initialise)
    return Sharded(require_module("megasnn.shard", module), initialise)


@dataclass(frozen=True)
class Sharded(LayerSource):
    """A network given to `shard`, which layers are made of when a model is built; a ValueError then is of one that
    cannot be given to layers, or has values."""

    network: nn.Module
    initialise: ModuleInitialiser | None

    def give(self) -> nn.Module:
        """The network, for a layer or several."""
        require_supported(self.network, "shard", *(["given"] if is_building() else []))
        paths: dict[nn.Module, str] = {}
        for path, module in self.network.named_modules(remove_duplicate=False):
            if is_stateful(module) and (first := paths.setdefault(module, path)) != path:
                raise ValueError(f"{path} is that of {first}: neurons at two places are not supported")
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
        rows, context = list[tuple[str, str, str]](), context_for(None)
        for path, part in _flat(self.network, "") if _is_flat(self.network) else [("", self.network)]:
            try:
                convert_network(Layer(path, part, path, self.initialise), context)
                why = why_whole(part)
                is_own = any(class_name(each) is None for each in part.modules())
                condition = ", if its own forwards work element by element" if is_own else ""
                text = f"whole on every rank: {why}" if why else f"cut by channel{condition}"
            except ValueError as error:
                text = f"refused: {error}"
            rows.append((path or "(itself)", type(part).__name__, text))
        name, kind = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
        return "\n".join(f"{row[0]:{name}}  {row[1]:{kind}}  {row[2]}" for row in rows)


def _is_flat(module: nn.Module) -> bool:
    """Tells whether it is no more than a sequence of its modules."""
    hooks = [value for name, value in vars(module).items() if name.endswith("_hooks")]
    return type(module) is nn.Sequential and not any(hooks)


def _flat(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():  # a module may stand at two places
        if child is not None:
            inner = _join(path, name)
            yield from _flat(child, inner) if _is_flat(child) else [(inner, child)]


def _join(*parts: str) -> str:
    return ".".join(filter(None, parts))


def convert_network(each: Layer, context: BuildContext) -> nn.Module:
    """Makes a layer of a copy of a network that was given to `shard`: of layers of ours, or else a plain one.

    Raises:
        ValueError: a module that cannot be computed alike on every layout neither cut nor whole.
    """
    network = without_values(each.module)
    if why_whole(network):
        return plain_layer(network, each.name, context, each.initialise)
    note_stepped(network)
    call, ours = LayerCall(context.time_steps, folds_time(network)), dict[nn.Module, nn.Module]()
    for path, part, conversion in _reached(network):
        if problem := problem_of(part, "kept" if conversion is None else "cut"):
            raise ValueError(f"{module_label(path, part)} {problem}")
        if conversion is not None and part not in ours:
            ours[part] = convert(part, conversion, context, each.initialise)
    return as_layer(swapped(network, ours), each.name, call)


def _reached(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module, Conversion | None]]:
    """A module and those in it, down to those that are converted, with their conversions; None where a module is
    computed by itself, as a neuron that none of ours computes."""
    is_node = hasattr(module, "surrogate_function")
    conversion = None if is_node and (not is_multi_step(module) or spec_of(module) is None) else in_table(module)
    yield path, module, conversion
    if conversion is None and not _is_leaf(module):
        for name, child in module.named_children():
            yield from _reached(child, _join(path, name))


def _is_leaf(module: nn.Module) -> bool:
    is_node = hasattr(module, "surrogate_function") and next(tensors_of(module), None) is None
    return is_node or next(module.children(), None) is None


def why_whole(network: nn.Module) -> str | None:
    """Reason why no rank can have a part of a network, and each computes all of it; None where sizes decide."""
    for path, part, conversion in _reached(network):
        if why := _why_not_cut(part, conversion):
            return f"{module_label(path, part)} {why}"
    return None


def _why_not_cut(module: nn.Module, conversion: Conversion | None) -> str | None:
    if isinstance(module, SEQUENCES):
        return "does not always call its parts one by one"  # in evaluation one kernel of torch's computes it
    if conversion is None:
        if next(own_tensors(module), None) is not None:
            return "has tensors of its own, and is not in the table"
        is_foreign = class_name(module) is not None and _is_leaf(module) and not is_by_channel(module)
        return "may mix channels" if is_foreign else None
    if isinstance(module, nn.modules.conv._ConvNd):
        sizes = zip(module.kernel_size, module.dilation, strict=True)
        is_uneven = module.padding == "same" and any(step * (size - 1) % 2 for size, step in sizes)
        if module.padding_mode != "zeros" or is_uneven:
            return f"has padding_mode {module.padding_mode!r}, or padding 'same' of an even kernel"
    return None
