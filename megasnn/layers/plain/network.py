"""Conversion for tensor parallelism: torch's and SpikingJelly's layers to MegaSNN's, cut by channel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from megasnn.layers.apply import is_stateful
from megasnn.layers.context import BuildContext, context_for, is_building
from megasnn.layers.init import ModuleInitialiser, below, own_tensors, tensors_of
from megasnn.layers.layer import Layer, LayerSource, module_initialiser, require_module
from megasnn.layers.plain.initial_values import without_values
from megasnn.layers.plain.refusals import (
    SEQUENCES,
    is_by_channel,
    module_label,
    note_stepped,
    problem_of,
    require_supported,
)
from megasnn.layers.plain.replicated import as_layer, folds_time, plain_layer, replace_parts
from megasnn.layers.plain.table import Conversion, class_name, convert, in_table, is_multi_step, spec_of
from megasnn.layers.plain_call import PlainCall


def shard(module: nn.Module, *, initialise: Callable[..., object] | None = None) -> Sharded:
    """Makes tensor-parallel layers from a copy of a network with torch's and SpikingJelly's layers.

    Example::

        yield from megasnn.shard(net)                          # an nn.Sequential: a layer for each module in it
        yield layer("stage1", megasnn.shard(resnet.layer1))    # any module: one layer
        print(megasnn.shard(net))                              # each layer, cut or whole, with the reason

    Tensors keep their names.

    Args:
        initialise: a function of a module, or of a module and its path in the model. It sets the module's initial
            values, after `reset_parameters`.
    Raises:
        ValueError: `module` is no module, or `initialise` no function of a module.
    """
    initialiser = module_initialiser("megasnn.shard", initialise)
    return Sharded(require_module("megasnn.shard", module), initialiser)


@dataclass(frozen=True)
class Sharded(LayerSource):
    """A network from `shard`. A model's build makes layers from it, or raises ValueError."""

    network: nn.Module
    initialise: ModuleInitialiser | None

    def module(self) -> nn.Module:
        """Raises ValueError for unsupported modules, or one neuron at two places."""
        uses = ("shard", "building") if is_building() else ("shard",)
        require_supported(self.network, *uses)
        paths: dict[nn.Module, str] = {}
        for path, module in self.network.named_modules(remove_duplicate=False):
            if not is_stateful(module):
                continue
            first = paths.setdefault(module, path)
            if first != path:
                raise ValueError(f"{path} is that of {first}: neurons at two places are not supported")
        return self.network

    def __iter__(self) -> Iterator[Layer]:
        if not _is_flat(self.network):
            raise ValueError(
                f'{type(self.network).__name__} has a forward of its own, or hooks, and is one layer: yield layer("a '
                'name", megasnn.shard(...)), or give shard an nn.Sequential of its parts'
            )
        for path, part in _flat(self.module(), ""):
            yield Layer(path, part, path, self.initialise, is_sharded=True)

    def __str__(self) -> str:
        parts = [("", self.network)]
        if _is_flat(self.network):
            parts = [*_flat(self.network, "")]
        rows = []
        for path, part in parts:
            layer = Layer(path, part, path, self.initialise)
            rows.append((path or "(itself)", type(part).__name__, _outcome(layer)))
        path_width = max((len(path) for path, _, _ in rows), default=0)
        kind_width = max((len(kind) for _, kind, _ in rows), default=0)
        return "\n".join(f"{path:{path_width}}  {kind:{kind_width}}  {outcome}" for path, kind, outcome in rows)


def _outcome(layer: Layer) -> str:
    try:
        convert_network(layer, context_for(None))
        why = why_whole(layer.module)
    except ValueError as error:
        return f"refused: {error}"
    if why is not None:
        return f"whole on every rank: {why}"
    has_own_code = any(class_name(each) is None for each in layer.module.modules())
    return "cut by channel, if its own forwards work element by element" if has_own_code else "cut by channel"


def _is_flat(module: nn.Module) -> bool:
    hooks = [value for name, value in vars(module).items() if name.endswith("_hooks")]
    return type(module) is nn.Sequential and not any(hooks)


def _flat(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    # Not named_children, which leaves out a module that stands at a second place.
    for name, child in module._modules.items():
        if child is None:
            continue
        inner = _join(path, name)
        if _is_flat(child):
            yield from _flat(child, inner)
        else:
            yield inner, child


def _join(*parts: str) -> str:
    return ".".join(filter(None, parts))


def convert_network(each: Layer, context: BuildContext) -> nn.Module:
    """A network's copy as a layer: MegaSNN's layers if it can be cut, otherwise a plain one.

    Raises ValueError for a module that neither cuts nor computes alike on every layout.
    """
    network = without_values(each.module)
    if why_whole(network):
        return plain_layer(network, each.name, context, each.initialise)
    note_stepped(network)
    call = PlainCall(context.time_steps, folds_time(network))
    ours: dict[nn.Module, nn.Module] = {}
    for path, part, conversion in _walk(network):
        problem = problem_of(part, "kept" if conversion is None else "cut")
        if problem:
            raise ValueError(f"{module_label(path, part)} {problem}")
        if conversion is not None and part not in ours:
            ours[part] = convert(part, conversion, context, below(_join(each.name, path), each.initialise))
    return as_layer(replace_parts(network, ours), each.name, call)


def _walk(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module, Conversion | None]]:
    """A module and its parts, down to converted ones; None for a module that is kept."""
    conversion = in_table(module)
    if hasattr(module, "surrogate_function") and (not is_multi_step(module) or spec_of(module) is None):
        # A neuron that MegaSNN's kernels do not compute.
        conversion = None
    yield path, module, conversion
    if conversion is None and not _is_leaf(module):
        for name, child in module.named_children():
            yield from _walk(child, _join(path, name))


def _is_leaf(module: nn.Module) -> bool:
    is_node = hasattr(module, "surrogate_function") and next(tensors_of(module), None) is None
    return is_node or next(module.children(), None) is None


def why_whole(network: nn.Module) -> str | None:
    """Why every rank computes a whole network; None if sizes and its own code decide."""
    for path, part, conversion in _walk(network):
        # One module that has tensors outside the table, or may mix channels, makes the whole network whole.
        why = _why_not_cut(part, conversion)
        if why:
            return f"{module_label(path, part)} {why}"
    return None


def _why_not_cut(module: nn.Module, conversion: Conversion | None) -> str | None:
    if isinstance(module, SEQUENCES):
        # torch has one kernel for all of them in evaluation.
        return "does not always call its parts one by one"
    if conversion is None:
        if next(own_tensors(module), None) is not None:
            return "has tensors of its own, and is not in the table"
        is_foreign = class_name(module) is not None and _is_leaf(module) and not is_by_channel(module)
        return "may mix channels" if is_foreign else None
    return None
