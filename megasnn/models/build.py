"""Builds layers from models' dimensions, without memory and values: makes and runs them, one after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from functools import cache, lru_cache
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from torch import nn

from megasnn.bundle import Bundle, entries_of, logits_of, shapes_text
from megasnn.config.checks import flag
from megasnn.grid import ContextCut
from megasnn.kernels import NeuronSpec
from megasnn.layers.context import BuildContext, building
from megasnn.layers.init import tensors_of, without_memory
from megasnn.layers.refusals import SHARDED, is_plain, refuse, refuse_mixed_rows
from megasnn.layers.replicated import apply_layer, forget_state, make_whole, plain_layer
from megasnn.layers.shape_inference import (
    MaxInference,
    RefuseRandom,
    content_of,
    note_never_called,
)
from megasnn.models.by_channel import ChannelWatch, cuts_by_shape, may_be_cut
from megasnn.models.convert_module import convert_network, why_whole
from megasnn.models.description import (
    DRY_SAMPLES,
    Built,
    Cuts,
    EntryDescription,
    LayerDescription,
    ModelDescription,
    Tie,
    sources,
)
from megasnn.models.layer import Layer
from megasnn.models.model import Model
from megasnn.models.summary import OperationCounter
from megasnn.models.task import task_of
from megasnn.models.ties import Ties, refuse_other_calls, separate, tie_all
from megasnn.parallel.sharding import described_tensors, parameter_count, sharded_tensors
from megasnn.parallel_state import Group

_LIBRARIES = (Path(__file__).parents[1], Path(torch.__file__).parent)


def describe(model: Model, neuron: NeuronSpec | None = None) -> ModelDescription:
    """The layers of a model with these dimensions and neurons; equal ones are described once.

    Args:
        neuron: None for what the model takes by default.
    Raises:
        ValueError: two layers have the same name, a layer cannot take what it is given or gives something else than it
            says, nothing takes what it gives, the last one gives no logits, or a function of the task fails.
    """
    return _described(model, neuron or model.neuron().spec)


@lru_cache(maxsize=8)
def _described(model: Any, neuron: NeuronSpec) -> ModelDescription:
    one = build(model, neuron, BuildContext())
    named = [(each.name, each.module) for each in one]
    refuse_other_calls(named)
    described = [
        LayerDescription(
            each.name,
            each.layer.unit,
            {key: EntryDescription(content_of(x), tuple(x.shape)) for key, x in entries_of(each.output).items()},
            each.layer.takes or (),
            parameter_count(list(sharded_tensors([(each.name, each.module)]))),
            each.operations,
        )
        for each in one
    ]
    specs = (_spec_of(part) for _, layer in named for part in layer.modules())
    return ModelDescription(
        layers=tuple(described),
        task=task_of(model).tried(one[-1].output),
        build=lambda context: build(model, neuron, context, one),
        time_steps=model.time_steps,
        input_shape=model.input_shape,
        num_classes=model.num_classes,
        ties=tuple(_ties(named)),
        tensors=tuple(sharded_tensors(named)),
        neurons=frozenset(spec for spec in specs if spec is not None),
    )


def _spec_of(module: nn.Module) -> NeuronSpec | None:
    spec = getattr(module, "spec", None)
    return spec if isinstance(spec, NeuronSpec) else None


def building_problems(
    model: Model,
    neuron: NeuronSpec,
    tensor_parallel: int,
    context_parallel: int = 1,
    cut: ContextCut = "samples",
) -> list[str]:
    """Lists why a model cannot be built for the first of so many tensor-parallel ranks, or shared by so many
    context-parallel ranks."""
    try:
        described = describe(model, neuron)
        tp, cp = Group("tp", tuple(range(tensor_parallel))), Group("cp", tuple(range(context_parallel)))
        if tp.size * cp.size > 1:
            described.build(BuildContext(tp=tp, cp=cp, cut=cut))
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


def _inputs_of(layers: Sequence[Layer], inputs: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Numbers, for each layer, of those it takes. Raises ValueError for an output, or an input, that nothing takes."""
    if empty := [each.name for each in layers if each.takes == ()]:
        raise ValueError(f"{empty[0]}: takes=() names no layer; leave it out to take the layer before")
    taken = sources([(each.name, each.takes or ()) for each in layers], inputs)
    used = {source for numbers in taken for source in numbers}
    for number, each in enumerate(layers[:-1]):
        if number not in used:
            raise ValueError(f"{each.name}: no later layer takes its output; name it in `takes`, or leave it out")
    if idle := [name for number, name in enumerate(inputs) if -1 - number not in used]:
        raise ValueError(f"no layer takes the input {idle[0]!r}; name it in `takes`, or leave it out of `inputs`")
    return taken


def _require_logits(model: Model, last: Built) -> None:
    """Raises ValueError for a last layer that gives something else."""
    wanted, logits = [model.time_steps, DRY_SAMPLES, model.num_classes], logits_of(last.output)
    if list(logits.shape) != wanted:
        raise ValueError(
            f"{last.name}: the last layer gives {list(logits.shape)} for {DRY_SAMPLES} samples, where logits are "
            f"{wanted}: --time-steps, samples, --num-classes"
        )


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
    task, outputs, built = task_of(model), dict[int, tuple[Bundle, Cuts]](), list[Built]()
    for number, spec in enumerate(task.inputs.values()):
        outputs[-1 - number] = spec.frames(spec.empty(DRY_SAMPLES, context.compute_dtype)), [False]
    for number, taken in enumerate(_inputs_of(layers, [*task.inputs])):
        each, inputs = layers[number], [outputs[source][0] for source in taken]
        cuts = [cut for source in taken for cut in outputs[source][1]]
        is_last, of_one = each is layers[-1], None if one is None else one[number].output
        made = _try_to_cut(each, context, inputs, cuts, len(taken) == 1 and taken[0] < 0) if size > 1 else None
        if made is None or (is_last and any(cuts_by_shape(made.output, of_one))):
            each = whole_layers()[number] if size > 1 else each
            module = _made(each, context.replicated())
            if size > 1:
                make_whole(module, context.tp, cuts, is_last)
            with OperationCounter(module) if one is None else nullcontext() as counter:
                output = dry_run(each.name, module, inputs)
            made = Built(replace(each, module=module), output, 0 if counter is None else counter.of_a_sample)
        outputs[number] = made.output, cuts_by_shape(made.output, of_one)
        built.append(made)
    tie_all([each.layer for each in built], ties)
    if task.classes:
        _require_logits(model, built[-1])
    return built


def _separated(model: Model, context: BuildContext) -> tuple[list[Layer], Ties]:
    with building(context), without_memory():
        return separate(_yielded(model))


def _try_to_cut(
    each: Layer, context: BuildContext, inputs: Sequence[Bundle], cuts: Cuts, is_first: bool
) -> Built | None:
    """Builds a layer that computes a rank's channels; None where it has to be whole.

    Args:
        cuts: of its inputs' tensors. is_first: it takes an input of the model alone.
    """
    has_tensors = next(tensors_of(each.module), None) is not None
    has_to_be_whole = bool(why_whole(each.module)) if each.is_sharded else (is_plain(each.module) and has_tensors)
    if has_to_be_whole:
        return None
    try:
        module = _made(each, context)
        if not may_be_cut(module, inputs, cuts, is_first):
            return None
        watch = ChannelWatch(module)
        output = dry_run(each.name, module, inputs, watch)
    except ValueError:
        return None  # such as for shapes; what is wrong with the layer anyway is said when it is built whole
    return None if watch.mixes else Built(replace(each, module=module), output)


def _yielded(model: Model) -> list[Layer]:
    """The layers as the model yields them. Raises ValueError for sizes that do not divide by the tensor parallel
    ranks, and two layers of one name."""
    layers: list[Layer] = []
    try:
        for each in model.layers():
            if not isinstance(each, Layer):
                kind = type(each).__name__
                raise ValueError(f'`layers` yields a {kind}; yield megasnn.layer("a name", module)')
            layers.append(each)
    except (ValueError, RuntimeError, ArithmeticError) as error:  # torch's own of sizes beyond all bounds
        place = f"the layer behind {layers[-1].name}" if layers else "the first layer"
        values = [f"{flag(each.name)} {getattr(model, each.name)}" for each in fields(model)]
        flags = "" if isinstance(error, ValueError) else f" ({' '.join(values)})"
        raise ValueError(f"{place}: {error}{flags}") from error
    if not layers:
        raise ValueError("`layers` yields nothing: a model has one layer or more, the last of which gives logits")
    names = [each.name for each in layers]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two layers of {model.name} have the name {twice[0]!r}; a name is for one layer")
    return layers


def _refuse_made_before(one: Sequence[Built], layers: Sequence[Layer]) -> None:
    """Raises ValueError for modules that one rank's layers have: they know nothing of flags and ranks. Functions as
    modules, like SpikingJelly's surrogates, may be shared."""
    before = {id(module) for each in one for module in each.module.modules()}
    for each in layers:
        for module in each.module.modules():
            has_state = isinstance(module, SHARDED) or any(True for _ in module.parameters())
            if has_state and id(module) in before:
                raise ValueError(f"{each.name}: made outside `layers`; make every module where it is yielded")


def _made(each: Layer, context: BuildContext) -> nn.Module:
    """Makes the module of a layer for a rank."""
    with building(context), without_memory():
        try:
            module = _for_rank(each, context)
            refuse_mixed_rows(module, context)
        except (ValueError, RuntimeError) as error:  # torch's own of modules without sizes
            raise ValueError(f"{each.name}: {error}") from error
    return module


def _for_rank(each: Layer, context: BuildContext) -> nn.Module:
    for module in each.module.modules():
        if getattr(module, "inplace", False) is True:  # would change what other stages, and a second forward, take
            module.inplace = False  # type: ignore[assignment]
    if each.is_sharded:
        return convert_network(each, context)
    if is_plain(each.module):
        return plain_layer(each.module, each.name, context, each.initialise)
    refuse(each.module, "inside")
    if each.initialise is not None:
        raise ValueError("initialise=... is for plain modules: give it to the sharded layers in this one")
    return each.module


# --- the dry run


def dry_run(
    name: str, layer: nn.Module, inputs: Sequence[Bundle], watch: AbstractContextManager[Any] | None = None
) -> Bundle:
    """The output of a layer on the meta device; the layer learns what its inputs hold.

    Args:
        watch: entered around its forward.
    Raises:
        ValueError: it cannot take what it is given, changes it or a buffer, or gives no tensors; names the layer.
    """
    for module in layer.modules():
        for noted in ("_calls", "_noted_height"):  # for another layer that it was copied of
            vars(module).pop(noted, None)
    before, buffers = _versions(inputs), dict(_buffers(layer))
    try:
        with MaxInference(), RefuseRandom(), watch or nullcontext():
            output = apply_layer(layer, inputs[0], range(DRY_SAMPLES), *inputs[1:])
        if wrong := [x for x in entries_of(output).values() if x.shape[1:2] != (DRY_SAMPLES,)]:
            raise ValueError(f"its output {list(wrong[0].shape)} is not [T, N, ...] of {DRY_SAMPLES} samples")
        if _versions(inputs) != before:
            raise ValueError(
                "it changes its input in place, which other layers and a forward that is computed again take as it "
                "was: let it work on a clone"
            )
        if changed := [name for name, version in _buffers(layer) if buffers.get(name) != version]:
            raise ValueError(
                f"it changes its buffer {changed[0]!r} in its forward, which replicas would do for their own samples, "
                "and again when it is computed again: let it keep no state"
            )
    except Exception as error:
        text = _explained(error, layer, len(inputs))
        raise ValueError(f"{name}, given {shapes_text(*inputs)}: {text}") from error
    forget_state(layer)
    note_never_called(layer)
    return output


def _buffers(layer: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """Buffers of modules that are not ours, with what changes when they do."""
    for path, module in layer.named_modules():
        if not type(module).__module__.startswith("megasnn."):
            for name, buffer in module.named_buffers(prefix=path, recurse=False):
                yield name, (id(buffer), buffer._version)


def _versions(outputs: Iterable[Bundle]) -> list[int]:
    """Versions: how often each tensor was changed in place."""
    return [entry._version for output in outputs for entry in entries_of(output).values()]


def _explained(error: Exception, layer: nn.Module, inputs: int) -> str:
    """Text of an error in the dry run of a layer, with the path of the innermost module whose forward raised it, and
    the last line of code that is neither MegaSNN's nor torch's."""
    called = list(walk_tb(error.__traceback__))
    paths = {id(each): path for path, each in layer.named_modules()}
    path = next((paths[me] for frame, _ in reversed(called) if (me := id(frame.f_locals.get("self"))) in paths), "")
    lines = [
        f" ({frame.f_code.co_filename}, line {number})"
        for frame, number in called
        if not any(Path(frame.f_code.co_filename).is_relative_to(folder) for folder in _LIBRARIES)
    ]
    text = f"KeyError: {error}" if isinstance(error, KeyError) else str(error)  # whose text is the key alone
    told = f"{f'in {path}: ' if path else ''}{text}{''.join(lines[-1:])}"
    if isinstance(error, TypeError):
        told += f"; it is called with {inputs} input(s), which `takes` of the layer names"
    return f"{told}; layers run once on the meta device, without values" if "meta" in text.split() else told
