"""Builds layers from models' dimensions, without memory and values: makes and runs them, one after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from megasnn.common.bundle import Bundle, entries_of, logits_of, shapes_text
from megasnn.common.grid import ContextCut, Grid
from megasnn.kernels import NeuronSpec
from megasnn.layers import ParallelConv, ParallelLinear
from megasnn.layers.context import BuildContext, building
from megasnn.layers.init import tensors_of
from megasnn.layers.layer import Layer
from megasnn.layers.plain.by_channel import ChannelWatch, cuts_by_shape, is_of_libraries, may_be_cut
from megasnn.layers.plain.initial_values import without_memory
from megasnn.layers.plain.network import convert_network, why_whole
from megasnn.layers.plain.refusals import is_plain, refuse_mixed_rows, require_supported
from megasnn.layers.plain.replicated import apply_layer, forget_state, make_whole, plain_layer
from megasnn.layers.shape_inference import (
    MaxInference,
    RefuseRandom,
    content_of,
    mark_both,
    note_never_called,
    said_of_values,
)
from megasnn.models.description import (
    DRY_SAMPLES,
    Built,
    EntryDescription,
    LayerDescription,
    ModelDescription,
    Tie,
    TiedTensors,
    has_state,
    separate,
    tie_all,
)
from megasnn.models.model import Model
from megasnn.models.task import Task, mean_over_time
from megasnn.parallel.sharding import described_tensors, parameter_count, sharded_tensors
from megasnn.parallel_state import ParallelState

_LIBRARIES = (Path(__file__).parents[1], Path(torch.__file__).parent)


def describe_model(model: Model, neuron: NeuronSpec | None = None) -> ModelDescription:
    """The layers of a model with these dimensions and neurons; equal ones are described once.

    Args:
        neuron: None for what the model takes by default.
    Raises:
        ValueError: names the layer that cannot be, or does not fit to others; a function of the task that fails.
    """
    return _described(model, neuron or model.neuron().spec)


@lru_cache(maxsize=8)
def _described(model: Any, neuron: NeuronSpec) -> ModelDescription:
    one = build(model, neuron, BuildContext())
    named = [(each.name, each.module) for each in one]
    described = [
        LayerDescription(
            each.name,
            each.layer_group,
            {key: EntryDescription(content_of(x), tuple(x.shape)) for key, x in entries_of(each.output).items()},
            each.inputs,
            parameter_count(list(sharded_tensors([(each.name, each.module)]))),
            each.operations,
        )
        for each in one
    ]
    specs = (getattr(part, "spec", None) for _, layer in named for part in layer.modules())
    return ModelDescription(
        layers=tuple(described),
        task=task_of(model).tried(one[-1].output),
        build=lambda context: build(model, neuron, context, one),
        ties=tuple(_ties(named)),
        tensors=tuple(sharded_tensors(named)),
        neurons=frozenset(spec for spec in specs if isinstance(spec, NeuronSpec)),
    )


def task_of(model: Model) -> Task:
    """The task of a model. Raises ValueError for a target that is no input's name, and for one without a loss."""
    inputs, target, own = dict(model.inputs), model.target, model.own_task()
    if not inputs or (isinstance(target, str) and target not in inputs):
        raise ValueError(f"the target is {target!r}, and the inputs are {', '.join(inputs) or 'none'}")
    if "target" in own and "loss" not in own:
        raise ValueError("the losses of --loss are for classes: give a model with a `target` a method `loss`, too")
    classes = 0 if "target" in own else model.num_classes
    metrics: Any = model.metrics or (None if classes else lambda output, target: {})
    evaluated = ("top1", "top5") if classes > 5 else ("top1",)  # top-5 of five classes is always right
    return Task(inputs, target, classes, model.loss, metrics, model.predict or mean_over_time, evaluated=evaluated)


def building_problems(
    model: Model, neuron: NeuronSpec, tensor_parallel: int, context_parallel: int = 1, cut: ContextCut = "samples"
) -> list[str]:
    """Lists why a model cannot be built for the first of so many tensor-parallel ranks, or shared by so many
    context-parallel ranks."""
    try:
        described = describe_model(model, neuron)
        grid = Grid(tp=tensor_parallel, cp=context_parallel)
        if grid.world_size > 1:
            described.build(BuildContext(ParallelState.without_process_groups(grid), cut=cut))
    except ValueError as error:
        return [f"{model.name}: {error}"]
    return []


def _ties(named_layers: Sequence[tuple[str, nn.Module]]) -> Iterator[Tie]:
    owners: dict[str, str] = {}
    for name, layer in named_layers:
        for entry in described_tensors([(name, layer)]):
            if entry.is_copy:
                yield Tie(entry.name, owners[entry.name], name)
            owners.setdefault(entry.name, name)


def _inputs_of(layers: Sequence[Layer], inputs: Sequence[str]) -> list[tuple[int, ...]]:
    """Numbers, for each layer, of those it takes; -1, -2 and so on are the model's inputs.

    Raises:
        ValueError: a name that is no earlier layer's and no input's, or is both; an output, or an input, that no layer
            takes.
    """
    numbers = {name: -1 - number for number, name in enumerate(inputs)}
    found: list[tuple[int, ...]] = []
    for number, each in enumerate(layers):
        if unknown := [name for name in each.takes if name not in numbers]:
            raise ValueError(f"{each.name} takes {unknown[0]!r}; inputs and earlier layers are {', '.join(numbers)}")
        if each.name in inputs:
            raise ValueError(f"the layer {each.name!r} has the name of an input; give it another one")
        found.append(tuple(numbers[name] for name in each.takes) or (number - 1,))
        numbers[each.name] = number
    used = {len(layers) - 1, *(source for sources in found for source in sources)}
    if unused := [name for name, number in numbers.items() if number not in used]:
        raise ValueError(f"{unused[0]}: no later layer takes it; name it in `takes`, or leave it out")
    return found


def _require_logits(model: Model, last: Built) -> None:
    """Raises ValueError for a last layer that gives something else."""
    wanted, found = [model.time_steps, DRY_SAMPLES, model.num_classes], list(logits_of(last.output).shape)
    if found != wanted:
        raise ValueError(f"{last.name} gives {found}, where logits are {wanted}: --time-steps, samples, --num-classes")


# --- building


def build(model: Model, neuron: NeuronSpec, context: BuildContext, one: Sequence[Built] | None = None) -> list[Built]:
    """Builds all layers for a rank, without memory. Each is made, and run once on the meta device, where it learns what
    its inputs hold.

    Args:
        one: the layers of one rank, which none of these may be; None for these themselves.
    Raises:
        ValueError: names the layer, and what cannot be computed alike on this layout.
    """
    context = replace(context, neuron=neuron, time_steps=model.time_steps)
    (layers, ties), size = _separated(model, context), context.tp.size
    whole_layers = cache(lambda: _separated(model, context.replicated())[0])
    if one is not None:
        _refuse_made_before(one, layers)
    task, outputs, built = task_of(model), dict[int, tuple[Bundle, Sequence[bool]]](), list[Built]()
    for number, spec in enumerate(task.inputs.values()):
        outputs[-1 - number] = spec.frames(spec.empty(DRY_SAMPLES, context.numerics.compute_dtype)), [False]
    for number, sources in enumerate(_inputs_of(layers, [*task.inputs])):
        each, inputs = layers[number], [outputs[source][0] for source in sources]
        cuts = [cut for source in sources for cut in outputs[source][1]]
        is_last, of_one = each is layers[-1], None if one is None else one[number].output
        operations, found = 0, None
        if size > 1:
            found = _try_to_cut(each, context, inputs, cuts, len(sources) == 1 and sources[0] < 0)
        if found is None or (is_last and any(cuts_by_shape(found[1], of_one))):
            module = _made(whole_layers()[number] if size > 1 else each, context.replicated())
            if size > 1:
                make_whole(module, context.tp, cuts, is_last)
            counted = list[int]() if one is None else None
            found = module, dry_run(each.name, module, inputs, counted=counted)
            operations = sum(counted or [])
        outputs[number] = found[1], cuts_by_shape(found[1], of_one)
        built.append(Built(each.name, each.layer_group, sources, *found, operations))
    tie_all(built, ties)
    if task.classes:
        _require_logits(model, built[-1])
    return built


def _separated(model: Model, context: BuildContext) -> tuple[list[Layer], TiedTensors]:
    with building(context), without_memory():
        return separate(_yielded(model))


def _try_to_cut(
    each: Layer, context: BuildContext, inputs: Sequence[Bundle], cuts: Sequence[bool], is_first: bool
) -> tuple[nn.Module, Bundle] | None:
    """Builds a layer that computes a rank's channels, and runs it; None where it has to be whole. Args: as of
    `may_be_cut`."""
    has_tensors = next(tensors_of(each.module), None) is not None
    if why_whole(each.module) if each.is_sharded else (is_plain(each.module) and has_tensors):
        return None
    try:
        module = _made(each, context)
        if not may_be_cut(module, inputs, cuts, is_first):
            return None
        watch = ChannelWatch(module)
        output = dry_run(each.name, module, inputs, watch)
    except ValueError:
        return None  # such as for shapes; what is wrong with the layer anyway is said when it is built whole
    return None if watch.mixes else (module, output)


def _yielded(model: Model) -> list[Layer]:
    """The layers as the model yields them. Raises ValueError for sizes that do not divide by the tensor parallel
    ranks, and two layers of one name."""
    layers: dict[str, Layer] = {}
    try:
        for each in model.layers():
            if not isinstance(each, Layer):
                raise ValueError(f'`layers` yields {each!r}; yield megasnn.layer("a name", module)')
            if each.name in layers:
                raise ValueError(f"two layers of {model.name} have the name {each.name!r}; a name is for one layer")
            layers[each.name] = each
    except (ValueError, RuntimeError, ArithmeticError) as error:  # torch's own of sizes beyond all bounds
        where = f"the layer behind {[*layers][-1]}" if layers else "the first layer"
        raise ValueError(f"{where}: {error}") from error
    if not layers:
        raise ValueError("`layers` yields nothing: a model has one layer or more")
    return [*layers.values()]


def _refuse_made_before(one: Sequence[Built], layers: Sequence[Layer]) -> None:
    """Raises ValueError for modules that one rank's layers have: they know nothing of flags and ranks."""
    before = {module for each in one for module in each.module.modules() if has_state(module)}
    for each in layers:
        if not before.isdisjoint(each.module.modules()):
            raise ValueError(f"{each.name}: made outside `layers`; make every module where it is yielded")


def _made(each: Layer, context: BuildContext) -> nn.Module:
    """Makes the module of a layer for a rank."""
    module = each.module
    parts: Iterator[Any] = module.modules()
    for part in parts:
        if getattr(part, "inplace", False) is True:  # would change what other stages, and a second forward, take
            part.inplace = False
    with building(context), without_memory():
        try:
            if each.is_sharded:
                module = convert_network(each, context)
            elif is_plain(module):
                module = plain_layer(module, each.name, context, each.initialise)
            elif each.initialise is not None:
                raise ValueError("initialise=... is for plain modules: give it to the sharded layers in this one")
            else:
                require_supported(module, "inside")
            refuse_mixed_rows(module, context)
        except (ValueError, RuntimeError) as error:  # torch's own of modules without sizes
            raise ValueError(f"{each.name}: {error}") from error
    return module


# --- the dry run


def dry_run(
    name: str,
    layer: nn.Module,
    inputs: Sequence[Bundle],
    watch: ChannelWatch | None = None,
    counted: list[int] | None = None,
) -> Bundle:
    """The output of a layer in training, on the meta device; the layer learns what its inputs hold.

    Code that is not a library's runs in evaluation, too: it may compute something else there.

    Args:
        watch: entered around each forward; then the output has the same shape in both.
        counted: is given the multiply-adds of a sample in training.
    Raises:
        ValueError: it cannot take what it is given, changes it or a buffer, or gives no tensors; names the layer.
    """
    for module in layer.modules():
        vars(module).pop("_has_learned", None)  # of another layer that it was copied of
    evaluated: Bundle | None = None
    try:
        if not is_of_libraries(layer):
            layer.eval()
            try:
                with torch.no_grad():
                    evaluated = _forward(layer, inputs, watch)
            except (RuntimeError, TypeError):  # may be of tensors without values alone, which only one rank can have
                if watch is not None:
                    raise
        layer.train()
        with nullcontext() if counted is None else _counting(layer, counted):
            output = _forward(layer, inputs, watch)
        if evaluated is not None:
            _join(output, evaluated, watch is not None)
    except Exception as error:
        raise ValueError(f"{name}, given {shapes_text(*inputs)}: {_explained(error, layer)}") from error
    note_never_called(layer)
    return output


def _forward(layer: nn.Module, inputs: Sequence[Bundle], watch: ChannelWatch | None) -> Bundle:
    """Runs a layer once, and forgets its state."""
    for module in layer.modules():
        for noted in ("_calls", "_noted_height"):
            vars(module).pop(noted, None)
    before, buffers = _versions(inputs), _buffers(layer)
    with MaxInference(), RefuseRandom(), watch or nullcontext():
        output = apply_layer(layer, inputs[0], range(DRY_SAMPLES), *inputs[1:])
    if wrong := [x for x in entries_of(output).values() if x.shape[1:2] != (DRY_SAMPLES,)]:
        raise ValueError(f"its output {list(wrong[0].shape)} is not [T, N, ...] of {DRY_SAMPLES} samples")
    if _versions(inputs) != before:
        raise ValueError("it changes its input in place, which others take as it was: let it work on a clone")
    if changed := [name for name, version in _buffers(layer).items() if buffers.get(name) != version]:
        raise ValueError(f"it changes its buffer {changed[0]!r}, on each replica otherwise: let it keep no state")
    forget_state(layer)
    return output


def _join(output: Bundle, evaluated: Bundle, has_one_shape: bool) -> None:
    """Marks an output in training with what it holds in evaluation, too. Raises ValueError where there are others."""
    trained, others = entries_of(output), entries_of(evaluated)
    if trained.keys() != others.keys() or (has_one_shape and shapes_text(output) != shapes_text(evaluated)):
        text = f"{shapes_text(output)} in training, and {shapes_text(evaluated)} in evaluation"
        raise ValueError(f"it gives {text}: let it give the same in both")
    for key, entry in trained.items():
        mark_both(entry, others[key])


@contextmanager
def _counting(layer: nn.Module, found: list[int]) -> Iterator[None]:
    """Counts multiply-adds of a sample in a dry run of a layer, around it; layers of ours give shapes alone there."""

    def add(module: ParallelConv | ParallelLinear, inputs: object, output: Tensor) -> None:
        found.append(output.numel() * module.weight[0].numel() // DRY_SAMPLES)

    ours = [each for each in layer.modules() if isinstance(each, (ParallelConv, ParallelLinear))]
    hooks = [each.register_forward_hook(add) for each in ours]
    try:
        with FlopCounterMode(display=False) as counter:
            yield
        found.append(counter.get_total_flops() // 2 // DRY_SAMPLES)
    finally:
        for hook in hooks:
            hook.remove()


def _buffers(layer: nn.Module) -> dict[str, tuple[int, int]]:
    """Buffers of modules that are not ours, with what changes when they do."""
    modules = layer.named_modules()
    others = [each for each in modules if not type(each[1]).__module__.startswith("megasnn.")]
    buffers = [each for path, module in others for each in module.named_buffers(prefix=path, recurse=False)]
    return {name: (id(buffer), buffer._version) for name, buffer in buffers}


def _versions(outputs: Iterable[Bundle]) -> list[int]:
    """Versions: how often each tensor was changed in place."""
    return [entry._version for output in outputs for entry in entries_of(output).values()]


def _explained(error: Exception, layer: nn.Module) -> str:
    """Text of an error in the dry run of a layer, with the path of the innermost module whose forward raised it, and
    the last line of code that is neither MegaSNN's nor torch's."""
    paths = {id(each): f"in {path}: " for path, each in layer.named_modules() if path}
    where = line = ""
    for frame, number in walk_tb(error.__traceback__):
        where = paths.get(id(frame.f_locals.get("self")), where)
        file = Path(frame.f_code.co_filename)
        if not any(file.is_relative_to(folder) for folder in _LIBRARIES):
            line = f" ({file}, line {number})"
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return f"{where}{said_of_values(error) or f'{kind}{error}'}{line}"
