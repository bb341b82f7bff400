"""Builds descriptions from models' dimensions: layers are built without memory, and run once without values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from functools import lru_cache, partial
from pathlib import Path
from traceback import walk_tb
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn

from megasnn.bundle import Bundle, Key, entries_of, logits_of, shapes_text
from megasnn.config import ModelConfig
from megasnn.config.checks import flag
from megasnn.grid import ContextCut
from megasnn.kernels import NeuronSpec
from megasnn.kernels.spike_codec import Content
from megasnn.layers.context import BuildContext, building
from megasnn.layers.init import initialise_sharded, tensors_of, without_memory
from megasnn.layers.plain import SHARDED, forget_state, is_plain, refuse_plain_parts, refuse_unshareable
from megasnn.layers.replicated import Gathered, apply_layer, is_whole, knows_no_ranks, placed, plain_layer
from megasnn.layers.row_context import one_height
from megasnn.layers.shape_inference import (
    MaxInference,
    content_of,
    inferring_requires_grad,
    is_ours,
    note_never_called,
)
from megasnn.models.cut_check import Cuts, MixedChannels, check_cut, is_known
from megasnn.models.description import (
    DRY_SAMPLES,
    INPUT,
    EntryDescription,
    LayerDescription,
    ModelDescription,
    Tie,
    frames_of,
    sources,
)
from megasnn.models.layer import Layer
from megasnn.models.summary import OperationCounter
from megasnn.models.ties import refuse_other_calls, separate, tie_all
from megasnn.parallel.sharding import described_tensors, parameter_count, sharded_tensors
from megasnn.parallel_state import Group

_LIBRARIES = (Path(__file__).parents[1], Path(torch.__file__).parent)


def describe(model: ModelConfig, neuron: NeuronSpec | None = None) -> ModelDescription:
    """The layers of a model with these dimensions and neurons; equal ones are described once.

    Args:
        neuron: None for what the model takes by default.
    Raises:
        ValueError: two layers have the same name, a layer cannot take what it is given or gives something else than it
            says, nothing takes what it gives, or the last one gives no logits.
    """
    return _described(type(model), cast(Any, model), neuron or model.neuron().spec)


@lru_cache(maxsize=8)
def _described(kind: type, model: ModelConfig, neuron: NeuronSpec) -> ModelDescription:
    layers = built(model, BuildContext(), neuron)
    names = [each.name for each in layers]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"two layers of {model.name} have the name {twice[0]!r}; a name is for one layer")
    named = [(each.name, each.module) for each in layers]
    counters = {each.name: OperationCounter(each.module) for each in layers}
    outputs = dry_run(named, _inputs_of(layers), model.input_shape, learns=True, trackers=counters)
    _require_logits(model, names[-1], outputs[-1])
    refuse_other_calls(named)
    described = [
        LayerDescription(
            each.name,
            each.unit,
            _output_of(y),
            each.takes or (),
            tuple(tuple(entry.shape) for entry in entries_of(y).values()),
            parameter_count(list(sharded_tensors([(each.name, each.module)]))),
            counters[each.name].of_a_sample,
        )
        for each, y in zip(layers, outputs, strict=True)
    ]
    run = partial(
        _built_and_run, model, neuron, layers, lru_cache(maxsize=None)(partial(_check, model, neuron, layers))
    )
    return ModelDescription(
        tuple(described),
        lambda context: [module for module, _ in run(context, DRY_SAMPLES)],
        model.time_steps,
        model.input_shape,
        model.num_classes,
        tuple(_ties(named)),
        run,
        tuple(sharded_tensors(named)),
        cast(Any, model).example_input,
    )


def building_problems(
    model: ModelConfig,
    neuron: NeuronSpec,
    tensor_parallel: int,
    context_parallel: int = 1,
    cut: ContextCut = "samples",
) -> list[str]:
    """Lists why a model cannot be built for the first of so many tensor-parallel ranks, or shared by so many
    context-parallel ranks."""
    try:
        described = describe(model, neuron)
        if context_parallel > 1:
            described.build(BuildContext(cp=Group("cp", tuple(range(context_parallel))), cut=cut))
        if tensor_parallel > 1:
            described.build(BuildContext(tp=Group("tp", tuple(range(tensor_parallel)))))
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


def _inputs_of(layers: Sequence[Layer]) -> tuple[tuple[int, ...], ...]:
    """Numbers, for each layer, of those it takes. Raises ValueError for an output that nothing takes."""
    if empty := [each.name for each in layers if each.takes == ()]:
        raise ValueError(f"{empty[0]}: takes=() names no layer; leave it out to take the layer before")
    taken = sources([(each.name, each.takes or ()) for each in layers])
    used = {source for numbers in taken for source in numbers}
    for number, each in enumerate(layers[:-1]):
        if number not in used:
            raise ValueError(f"{each.name}: no later layer takes its output; name it in `takes`, or leave it out")
    return taken


def _require_logits(model: ModelConfig, name: str, output: Bundle, samples: int = DRY_SAMPLES) -> None:
    """Raises ValueError for a last layer that gives something else."""
    wanted, logits = [model.time_steps, samples, model.num_classes], logits_of(output)
    if list(logits.shape) != wanted:
        raise ValueError(
            f"{name}: the last layer gives {list(logits.shape)} for {samples} samples, where logits are {wanted}: "
            "--time-steps, samples, --num-classes"
        )


def _output_of(output: Bundle) -> Content | Mapping[Key, EntryDescription]:
    """Content of a layer's output."""
    found = {key: EntryDescription(content_of(x), tuple(x.shape)) for key, x in entries_of(output).items()}
    return found[None].content if None in found else found


# --- building


def built(model: ModelConfig, context: BuildContext | None = None, neuron: NeuronSpec | None = None) -> list[Layer]:
    """All layers, without memory. Raises ValueError for sizes that do not divide by the tensor parallel ranks."""
    context = replace(context or BuildContext(), neuron=neuron or NeuronSpec(), time_steps=model.time_steps)
    layers: list[Layer] = []
    with building(context), without_memory():
        try:
            for each in model.layers():
                if not isinstance(each, Layer):
                    kind = type(each).__name__
                    raise ValueError(f'`layers` yields a {kind}; yield megasnn.layer("a name", module)')
                layers.append(each)
        except (ValueError, RuntimeError, ArithmeticError) as error:  # torch's own of sizes beyond all bounds
            place = f"the layer behind {layers[-1].name}" if layers else "the first layer"
            values = [f"{flag(each.name)} {getattr(model, each.name)}" for each in fields(cast(Any, model))]
            flags = "" if isinstance(error, ValueError) else f" ({' '.join(values)})"
            raise ValueError(f"{place}: {error}{flags}") from error
        if not layers:
            raise ValueError("`layers` yields nothing: a model has one layer or more, the last of which gives logits")
        layers, ties = separate(layers)
        last = len(layers) - 1
        for number, each in enumerate(layers):
            try:
                module = _as_layer(each, context, number == 0, number == last, model.num_classes)
                refuse_unshareable(module, context)
            except ValueError as error:
                raise ValueError(f"{each.name}: {error}") from error
            layers[number] = replace(each, module=module)
        tie_all(layers, ties)
        return layers


def _as_layer(each: Layer, context: BuildContext, first: bool, last: bool, classes: int) -> nn.Module:
    """The module of a layer; a plain one is whole on every tensor parallel rank, or mixes no channels."""
    for module in each.module.modules():
        if getattr(module, "inplace", False) is True:  # would change what other stages, and a second forward, take
            module.inplace = False  # type: ignore[assignment]
    if knows_no_ranks(each.module):
        return placed(each.module, each.name, classes if last else 0)
    if is_plain(each.module):
        has_tensors = next(tensors_of(each.module), None) is not None
        whole = first or last or has_tensors or each.name in context.replicated
        return plain_layer(each.module, context, each.initialise, whole=whole, keeps_whole=last)
    refuse_plain_parts(each.module)
    if each.initialise is not None:
        initialise_sharded(each.module, each.initialise)
    return each.module


def _refuse_made_before(layers: Sequence[Layer], again: Sequence[Layer]) -> None:
    """Raises ValueError for modules that are the same in two buildings: they know nothing of flags and ranks. Functions
    as modules, like SpikingJelly's surrogates, may be shared."""
    before = {id(module) for each in layers for module in each.module.modules()}
    for each in again:
        for module in each.module.modules():
            has_state = isinstance(module, SHARDED) or any(True for _ in module.parameters())
            if has_state and id(module) in before:
                raise ValueError(f"{each.name}: made outside `layers`; make every module where it is yielded")


def _built_and_run(
    model: ModelConfig,
    neuron: NeuronSpec,
    before: Sequence[Layer],
    check: Callable[[int], Checked],
    context: BuildContext,
    samples: int,
) -> Sequence[tuple[nn.Module, Bundle]]:
    """All layers for a rank, and what each of them gives in a dry run of so many samples.

    Args:
        before: the layers of one rank, which none of these may be.
        check: finds what mixes channels, for a number of tensor parallel ranks.
    """
    replicated, cuts = check(context.tp.size)
    layers = built(model, replace(context, replicated=replicated), neuron)
    _refuse_made_before(before, layers)
    named = [(each.name, each.module) for each in layers]
    for name, layer in named:
        for path, each in layer.named_modules(prefix=name):
            if is_whole(each):
                cast(Gathered, each.forward).cuts = cuts.get(path, ())
    outputs = dry_run(
        named,
        _inputs_of(layers),
        model.input_shape,
        context.compute_dtype,
        samples,
        learns=True,
        replicated=context.dp.size * context.cp.size > 1,
    )
    _require_logits(model, layers[-1].name, outputs[-1], samples)
    return [(each.module, output) for each, output in zip(layers, outputs, strict=True)]


Checked = tuple[frozenset[str], Mapping[str, Cuts]]
"""Paths of modules that are whole because they mix channels; how the inputs of all that are whole are cut."""


def _check(model: ModelConfig, neuron: NeuronSpec, before: Sequence[Layer], size: int) -> Checked:
    """Finds modules that mix channels, for so many tensor parallel ranks.

    Raises MixedChannels for one that cannot be whole.
    """
    replicated, checked, mixed = frozenset[str](), dict[Any, Any](), None
    while size > 1:
        context = BuildContext(
            dtype=torch.float64, compute_dtype=torch.float64, neuron_backend="torch", replicated=replicated
        )
        try:
            layers = built(model, replace(context, tp=Group("tp", tuple(range(size)))), neuron)
        except ValueError as error:
            raise mixed or error from error
        _refuse_made_before(before, layers)
        if all(is_known(each.module) and not is_whole(each.module) for each in layers):
            break
        whole, cut = ([(each.name, each.module) for each in made] for made in (built(model, context, neuron), layers))
        try:
            example = cast(Any, model).example_input(DRY_SAMPLES, torch.Generator().manual_seed(0))
            frames = frames_of(example.double(), model.input_shape)
            return replicated, check_cut(whole, cut, _inputs_of(layers), frames, size, checked)
        except MixedChannels as error:
            layer = dict(cut)[error.layer]
            path = error.layer if is_plain(layer) else error.path
            if not knows_no_ranks(layer) or path in replicated:
                raise
            replicated, mixed = replicated | {path}, error
    return replicated, {}


# --- the dry run


def dry_run(
    named_layers: Iterable[tuple[str, nn.Module]],
    taken: Sequence[Sequence[int]],
    input_shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    samples: int = DRY_SAMPLES,
    learns: bool = False,
    trackers: Mapping[str, AbstractContextManager[Any]] = MappingProxyType({}),
    replicated: bool = False,
) -> list[Bundle]:
    """The outputs of layers on the meta device, one after another; the layers learn what their inputs hold.

    Args:
        taken: for each layer, the numbers of the layers whose outputs it takes.
        samples: how many there are.
        learns: whether the outputs show what needs a gradient.
        trackers: by a layer's name, what is entered around its forward, and sees the functions in it.
        replicated: whether other ranks run the same layers on other samples.
    Raises:
        ValueError: a layer cannot take what it is given, changes what another one takes too, or gives no tensors; names
            the layer.
    """
    frames = frames_of(torch.empty((samples, *input_shape), dtype=dtype, device="meta"), input_shape)
    outputs: list[Bundle] = []
    with inferring_requires_grad() if learns else torch.no_grad(), MaxInference():
        for (name, layer), numbers in zip(named_layers, taken, strict=True):
            inputs = [frames if number == INPUT else outputs[number] for number in numbers]
            before, buffers = _versions(inputs), dict(_buffers(layer))
            try:
                with one_height(layer), trackers.get(name, nullcontext()):
                    output = apply_layer(layer, inputs[0], range(samples), *inputs[1:])
                entries_of(output)
                if _versions(inputs) != before:
                    raise ValueError(
                        "it changes its input in place, which other layers and a forward that is computed again take "
                        "as it was: let it work on a clone"
                    )
                changed = [name for name, version in _buffers(layer) if buffers.get(name) != version]
                if changed and replicated:
                    raise ValueError(
                        f"it changes its buffer {changed[0]!r} in its forward, and every replica would do so for its "
                        "own samples: let it keep no state, or train with one replica"
                    )
            except Exception as error:
                text = _explained(error, layer, len(inputs))
                raise ValueError(f"{name}, given {shapes_text(*inputs)}: {text}") from error
            forget_state(layer)
            note_never_called(layer)
            outputs.append(output)
    return outputs


def _buffers(layer: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """Buffers of modules that are not ours, with what changes when they do."""
    for path, module in layer.named_modules():
        if not is_ours(module):
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
