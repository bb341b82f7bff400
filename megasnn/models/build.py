"""Builds a model's layers for a rank, without memory and values, and describes the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from megasnn.common.bundle import Bundle, entries_of, logits_of
from megasnn.common.grid import ContextCut, Grid
from megasnn.kernels import NeuronSpec
from megasnn.layers.apply import make_whole
from megasnn.layers.bispike import ParallelBiSpike
from megasnn.layers.context import BuildContext, building
from megasnn.layers.init import tensors_of
from megasnn.layers.layer import Layer
from megasnn.layers.neuron import NeuronLayer, ParallelNeuron
from megasnn.layers.plain.by_channel import ChannelWatch, cuts_by_shape, may_be_cut
from megasnn.layers.plain.initial_values import without_memory
from megasnn.layers.plain.network import convert_network, why_whole
from megasnn.layers.plain.refusals import is_plain, refuse_mixing, require_supported
from megasnn.layers.plain.replicated import plain_layer
from megasnn.layers.shape_inference import content_of
from megasnn.layers.tensors import described_tensors, initialise_further, sharded_tensors
from megasnn.layers.token_context import divide_tokens
from megasnn.models.description import (
    DRY_SAMPLES,
    Built,
    EntryDescription,
    LayerDescription,
    ModelDescription,
    Tie,
)
from megasnn.models.dry_run import dry_run
from megasnn.models.model import Model
from megasnn.models.task import TARGET, Task, task_of
from megasnn.models.ties import TiedTensors, has_state, separate, tie_all
from megasnn.parallel.sharding import parameter_count
from megasnn.parallel_state import ParallelState


def describe_model(model: Model, neuron: NeuronSpec | None = None) -> ModelDescription:
    """Equal models are described once.

    Args:
        neuron: the layers' default; None for the model's own.
    Raises:
        ValueError: a layer cannot be built or does not fit its inputs, or a task function fails; names it.
    """
    return _describe(model, neuron or model.neuron().spec)


# A run describes its model when flags are checked, before ranks join, and again in its Engine.
@lru_cache(maxsize=8)
def _describe(model: Any, neuron: NeuronSpec) -> ModelDescription:
    layers = build(model, neuron, BuildContext())
    named = [(layer.name, layer.module) for layer in layers]
    neurons: set[NeuronSpec] = set()
    kernel_neurons: set[str] = set()
    plain_neurons: set[str] = set()
    calibrates = False
    for _, layer in named:
        for module in layer.modules():
            spec = getattr(module, "spec", None)
            if isinstance(spec, NeuronSpec):
                neurons.add(spec)
            if isinstance(module, ParallelBiSpike) and module.amplitude is not None:
                calibrates = True
            if isinstance(module, ParallelNeuron | ParallelBiSpike):
                kernel_neurons.add(module.spec.kind)
            elif isinstance(module, NeuronLayer) or hasattr(module, "surrogate_function"):
                plain_neurons.add(type(module).__name__)
    return ModelDescription(
        layers=tuple(map(_layer_description, layers)),
        task=task_of(model).tried(layers[-1].output),
        build=lambda context: build(model, neuron, context, layers),
        ties=tuple(_ties(named)),
        tensors=tuple(sharded_tensors(named)),
        neurons=frozenset(neurons),
        kernel_neurons=frozenset(kernel_neurons),
        plain_neurons=frozenset(plain_neurons),
        calibrates=calibrates,
    )


def _layer_description(built: Built) -> LayerDescription:
    entries = {}
    for key, x in entries_of(built.output).items():
        entries[key] = EntryDescription(content_of(x), tuple(x.shape))
    parameters = parameter_count(sharded_tensors([(built.name, built.module)]))
    return LayerDescription(built.name, built.layer_group, entries, built.inputs, parameters, built.operations)


def _ties(named_layers: Sequence[tuple[str, nn.Module]]) -> Iterator[Tie]:
    owners: dict[str, str] = {}
    for name, layer in named_layers:
        for entry in described_tensors([(name, layer)]):
            if entry.is_copy:
                yield Tie(entry.name, owners[entry.name], name)
            owners.setdefault(entry.name, name)


def building_problems(
    model: Model, neuron: NeuronSpec, grid: Grid | None = None, cut: ContextCut = "samples"
) -> list[str]:
    """Why the first rank cannot build a model on a grid, by default of one rank; empty if it can."""
    try:
        described = describe_model(model, neuron)
        if grid is not None and grid.tp * grid.cp > 1:
            described.build(BuildContext(ParallelState.without_process_groups(grid), context_cut=cut))
    except ValueError as error:
        return [f"{model.name}: {error}"]
    return []


class _Output(NamedTuple):
    """A layer's output, or a model input, in the dry run.

    Attributes:
        cuts: by tensor; True if a tensor-parallel rank has only its own channels.
    """

    bundle: Bundle
    cuts: Sequence[bool]


def build(
    model: Model, neuron: NeuronSpec, context: BuildContext, single_rank_layers: Sequence[Built] | None = None
) -> list[Built]:
    """Builds all layers for a rank, without memory, and runs each on the meta device.

    Args:
        single_rank_layers: a single rank's layers, to compare shapes with; None to build them.
    Raises:
        ValueError: names a layer that cannot be computed alike on this layout.
    """
    context = replace(context, neuron=neuron, time_steps=model.time_steps)
    task = task_of(model)
    _require_cuttable(task, context)
    layers, ties = _make_layers(model, context)
    if single_rank_layers is not None:
        _refuse_made_before(single_rank_layers, layers)
    # A layer that cannot be cut is made a second time, for one rank.
    whole_layers = cache(lambda: _make_layers(model, context.replicated())[0])
    outputs = _dry_inputs(task, context.numerics.compute_dtype)
    built: list[Built] = []
    for number, sources in enumerate(_sources_of(layers, task)):
        layer = layers[number]
        inputs = [outputs[source] for source in sources]
        is_last = layer is layers[-1]
        whole_output = None if single_rank_layers is None else single_rank_layers[number].output
        built_layer = None
        if context.tp.size > 1:
            built_layer = _build_cut_if_valid(layer, context, sources, inputs)
        if built_layer is not None and is_last and any(cuts_by_shape(built_layer.output, whole_output)):
            # The loss takes whole logits.
            built_layer = None
        if built_layer is None:
            if context.tp.size > 1:
                layer = whole_layers()[number]
            built_layer = _build_whole(layer, context, sources, inputs, is_last, counts=single_rank_layers is None)
        outputs[number] = _Output(built_layer.output, cuts_by_shape(built_layer.output, whole_output))
        built.append(built_layer)
    tie_all(built, ties)
    if task.classes:
        _require_logits(model, built[-1])
    return built


def _require_cuttable(task: Task, context: BuildContext) -> None:
    """Raises ValueError for inputs without the rows or tokens that context-parallel ranks divide."""
    if context.token_group is not None:
        divide_tokens(task.tokens, context.token_group.size)
    if context.row_group is not None:
        for name, spec in task.inputs.items():
            if len(spec.shape) - spec.over_time < 2:
                raise ValueError(
                    f"--context-parallel-cut rows cuts images, and the input {name} {[*spec.shape]} is none: use "
                    "--context-parallel-cut samples, or tokens"
                )


def _dry_inputs(task: Task, dtype: torch.dtype) -> dict[int, _Output]:
    """The model's inputs, and a target that is no input, by number. Every rank has them whole."""
    specs = {number: task.inputs[name] for number, name in task.input_names.items()}
    if not isinstance(task.target, str):
        specs[task.target_number] = task.target
    return {number: _Output(spec.frames(spec.empty(DRY_SAMPLES, dtype)), [False]) for number, spec in specs.items()}


def _make_layers(model: Model, context: BuildContext) -> tuple[list[Layer], TiedTensors]:
    """The model's layers, each with its own modules, and their ties.

    Raises ValueError for no layers, two with one name, and sizes that do not fit.
    """
    layers: dict[str, Layer] = {}
    # `Model.layers` is the user's and takes no context: each MegaSNN layer in it takes this one from `context_for`.
    with building(context), without_memory():
        try:
            for layer in model.layers():
                if not isinstance(layer, Layer):
                    raise ValueError(f'`layers` yields {layer!r}; yield megasnn.layer("a name", module)')
                if layer.name in layers:
                    raise ValueError(f"two layers of {model.name} are named {layer.name!r}; a name is for one layer")
                layers[layer.name] = layer
        except (ValueError, RuntimeError, ArithmeticError) as error:
            # torch raises the last two for sizes out of bounds.
            where = f"the layer behind {[*layers][-1]}" if layers else "the first layer"
            raise ValueError(f"{where}: {error}") from error
        if not layers:
            raise ValueError("`layers` yields nothing: a model has one layer or more")
        return separate([*layers.values()])


def _refuse_made_before(single_rank_layers: Sequence[Built], layers: Sequence[Layer]) -> None:
    """Raises ValueError for modules shared with another build."""
    # A module made outside `layers` lacks this rank's flags, and two builds would share its tensors.
    before: set[nn.Module] = set()
    for built in single_rank_layers:
        before.update(module for module in built.module.modules() if has_state(module))
    for layer in layers:
        if not before.isdisjoint(layer.module.modules()):
            raise ValueError(f"{layer.name}: made outside `layers`; make every module where it is yielded")


def _sources_of(layers: Sequence[Layer], task: Task) -> list[tuple[int, ...]]:
    """By layer, its sources' numbers.

    Raises:
        ValueError: an unknown or ambiguous name, an unused output or input, or a layer before the last one that takes
            the target.
    """
    input_names = task.input_names
    numbers = {name: number for number, name in input_names.items()}
    sources_of_layers: list[tuple[int, ...]] = []
    # The loss takes the last layer's output.
    used = {len(layers) - 1}
    for number, layer in enumerate(layers):
        if layer is layers[-1] and not isinstance(task.target, str):
            # A layer may have this name, too.
            numbers.setdefault(TARGET, task.target_number)
        for name in layer.takes:
            if name == TARGET and name not in numbers:
                raise ValueError(f"{layer.name} takes {name!r}: only the last layer may take what the model learns")
            if name not in numbers:
                raise ValueError(f"{layer.name} takes {name!r}; inputs and earlier layers are {', '.join(numbers)}")
        if layer.name in input_names.values():
            raise ValueError(f"the layer {layer.name!r} has the name of an input; give it another one")
        # Without `takes`: the layer before; the first layer takes the first input, which is -1.
        sources = tuple(numbers[name] for name in layer.takes) or (number - 1,)
        sources_of_layers.append(sources)
        used.update(sources)
        numbers[layer.name] = number
    for name, number in numbers.items():
        if number not in used and number != task.target_number:
            raise ValueError(f"{name}: no later layer takes it; name it in `takes`, or leave it out")
    return sources_of_layers


def _build_cut_if_valid(
    layer: Layer, context: BuildContext, sources: tuple[int, ...], inputs: Sequence[_Output]
) -> Built | None:
    """The layer, already made with this rank's channels; None if it must be made whole."""
    if layer.is_sharded:
        must_be_whole = bool(why_whole(layer.module))
    else:
        has_tensors = next(tensors_of(layer.module), None) is not None
        must_be_whole = is_plain(layer.module) and has_tensors
    if must_be_whole:
        return None
    bundles = [x.bundle for x in inputs]
    takes_frames = len(sources) == 1 and sources[0] < 0
    try:
        module = _build_module(layer, context)
        if not may_be_cut(module, bundles, _cuts(inputs), takes_frames):
            return None
        watch = ChannelWatch(module)
        output = dry_run(layer.name, module, bundles, watch)
    except ValueError:
        # Often a shape that does not divide. A real mistake is raised when the layer is built whole.
        return None
    return None if watch.mixes else Built(layer.name, layer.layer_group, sources, module, output)


def _build_whole(
    layer: Layer,
    context: BuildContext,
    sources: tuple[int, ...],
    inputs: Sequence[_Output],
    is_last: bool,
    counts: bool,
) -> Built:
    """A layer that every tensor-parallel rank computes whole. `counts`: count its multiply-adds."""
    module = _build_module(layer, context.replicated())
    if context.tp.size > 1:
        make_whole(module, context.tp, _cuts(inputs), is_last)
    counted: list[int] | None = [] if counts else None
    output = dry_run(layer.name, module, [x.bundle for x in inputs], counted=counted)
    return Built(layer.name, layer.layer_group, sources, module, output, sum(counted or []))


def _cuts(inputs: Sequence[_Output]) -> list[bool]:
    cuts = list[bool]()
    for x in inputs:
        cuts += x.cuts
    return cuts


def _build_module(layer: Layer, context: BuildContext) -> nn.Module:
    module = layer.module
    parts: Iterator[Any] = module.modules()
    for part in parts:
        if getattr(part, "inplace", False) is True:
            # Other stages, and a second forward, read the same input.
            part.inplace = False
    with building(context), without_memory():
        try:
            if layer.is_sharded:
                module = convert_network(layer, context)
            elif is_plain(module):
                module = plain_layer(module, layer.name, context, layer.initialise)
            elif layer.initialise is not None:
                require_supported(module, "inside")
                initialise_further(module, layer.name, layer.initialise)
            else:
                require_supported(module, "inside")
            refuse_mixing(module, context)
        except (ValueError, RuntimeError) as error:
            # torch raises RuntimeError for modules without sizes.
            raise ValueError(f"{layer.name}: {error}") from error
    return module


def _require_logits(model: Model, last: Built) -> None:
    wanted = [model.time_steps, DRY_SAMPLES, model.num_classes]
    shape = list(logits_of(last.output).shape)
    if shape != wanted:
        raise ValueError(f"{last.name} gives {shape}, where logits are {wanted}: --time-steps, samples, --num-classes")
