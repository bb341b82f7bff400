"""From a model's dimensions to its description: its layers are built without memory, and run once without values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import nn

from megasnn.bundle import Bundle, Key, entries_of, logits_of, shapes_text
from megasnn.config import ModelConfig
from megasnn.config.checks import flag
from megasnn.kernels import NeuronSpec
from megasnn.kernels.spike_codec import Content
from megasnn.layers.channels import MixedChannels, mark_replicated
from megasnn.layers.context import BuildContext, building
from megasnn.layers.cut_tracking import CutTracker, Event, Recorder, is_ours
from megasnn.layers.holding import Holding, content_of, note_never_called, say_input, showing_need_of_gradient
from megasnn.layers.own_values import initialise_sharded, tensors_of, without_memory
from megasnn.layers.plain import SHARDED, forget_state, is_plain, refuse_plain_parts
from megasnn.layers.shareable import one_height, refuse_unshareable
from megasnn.layers.whole import apply_layer, is_called_as_sharded, is_whole, make_whole, placed
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
from megasnn.models.explained import explained
from megasnn.models.layer import Layer
from megasnn.models.ties import refuse_other_calls, separate, tie_all
from megasnn.parallel.sharding import copied_tensors, freeze, sharded_tensors

MOST_LAYERS = 4_000
"""A depth beyond that is a mistake, or a checkpoint's that is meant to take all memory."""


def describe(model: ModelConfig, neuron: NeuronSpec | None = None) -> ModelDescription:
    """The layers of a model with these dimensions and neurons; equal ones are described once.

    Args:
        neuron: None for what the model takes by default.
    Raises:
        ValueError: two layers have the same name, a layer cannot take what it is given or gives something else than it
            says, nothing takes what it gives, or the last one gives no logits.
    """
    neuron = neuron or model.neuron().spec
    try:
        hash(model)
    except TypeError:  # of a field, such as a list
        return _described_anew(type(model), model, neuron)
    return _described_once(type(model), cast(Any, model), neuron)


def _described_anew(kind: type, model: ModelConfig, neuron: NeuronSpec) -> ModelDescription:
    layers = built(model, BuildContext(), neuron)
    names = [each.name for each in layers]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"two layers of {model.name} have the name {twice[0]!r}; a name is for one layer")
    named = [(each.name, each.module) for each in layers]
    taken = _sources(layers)
    recorded: dict[str, Recorder] = {}
    outputs = dry_run(named, taken, model.input_shape, learns=True, watch=partial(_recorder, recorded))
    _require_logits(model, names[-1], outputs[-1])
    refuse_other_calls(named)
    described = [
        LayerDescription(each.name, each.unit, _described(each, y), each.takes or ())
        for each, y in zip(layers, outputs, strict=True)
    ]
    events = {name: recorder.events for name, recorder in recorded.items()}
    run = partial(_built_and_run, model, neuron, layers, events)
    tensors, ties = tuple(sharded_tensors(named)), tuple(_ties(named))
    return ModelDescription(
        tuple(described),
        partial(_build, run),
        model.time_steps,
        model.input_shape,
        model.num_classes,
        ties,
        run,
        tensors,
        getattr(model, "example_input", None),
    )


_described_once = lru_cache(maxsize=8)(_described_anew)


def _ties(named_layers: Sequence[tuple[str, nn.Module]]) -> Iterator[Tie]:
    owners: dict[str, str] = {}
    for layer in named_layers:
        owners |= {entry.name: layer[0] for entry in sharded_tensors([layer])}
        for entry in copied_tensors([layer]):
            yield Tie(entry.name, owners[entry.name], layer[0])


def _sources(layers: Sequence[Layer]) -> tuple[tuple[int, ...], ...]:
    """For each layer, the numbers of those it takes. Raises ValueError for an output that nothing takes."""
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


def _refuse_made_before(layers: Sequence[Layer], again: Sequence[Layer]) -> None:
    """Raises ValueError for modules that are the same in two buildings: they know nothing of flags and ranks."""
    before = {id(module) for each in layers for module in each.module.modules() if not _is_bare(module)}
    for each in again:
        if any(id(module) in before for module in each.module.modules()):
            raise ValueError(f"{each.name}: made outside `layers`; make every module where it is yielded")


def _is_bare(module: nn.Module) -> bool:
    """Functions as modules, like SpikingJelly's surrogates, may be shared."""
    return not isinstance(module, SHARDED) and not any(True for _ in module.parameters())


def _described(each: Layer, output: Bundle) -> Content | Mapping[Key, EntryDescription]:
    """What a layer says that its output holds. Raises ValueError where the dry run shows something else."""
    entries = entries_of(output)
    said: dict[Key, Content | None] = dict.fromkeys(entries)
    if isinstance(each.holds, Content):
        said = {None: each.holds}
    elif each.holds is not None:
        said = {}
        said.update(each.holds if isinstance(each.holds, Mapping) else enumerate(each.holds))
    if said.keys() != entries.keys():
        has = "it is one tensor" if None in entries else f"it has the entries {list(entries)}"
        names = "of one tensor" if None in said else f"of the entries {list(said)}"
        raise ValueError(f"{each.name}: holds= tells {names}, and of the output the dry run shows that {has}")
    found: dict[Key, EntryDescription] = {}
    for key, entry in entries.items():
        content = content_of(entry)
        if said[key] is Content.SPIKES and content is Content.COUNTS:
            place = "its output" if key is None else f"entry {key!r} of its output"
            raise ValueError(f"{each.name}: holds=SPIKES, but {place} can be larger than 1; say COUNTS, or nothing")
        found[key] = EntryDescription(said[key] or content, tuple(entry.shape))
    return found[None].content if None in found else found


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
                if len(layers) > MOST_LAYERS:
                    raise ValueError(f"a model has up to {MOST_LAYERS} layers")
        except (ValueError, RuntimeError, ArithmeticError) as error:  # torch's own of sizes beyond all bounds
            place = f"the layer behind {layers[-1].name}" if layers else "the first layer"
            flags = "" if isinstance(error, ValueError) else f" ({_flags_of(model)})"
            raise ValueError(f"{place}: {error}{flags}") from error
        if not layers:
            raise ValueError("`layers` yields nothing: a model has one layer or more, the last of which gives logits")
        _refuse_shard_of_one(layers)
        layers, ties = separate(layers)
        last, classes = len(layers) - 1, model.num_classes
        layers = [_as_layer(each, context, number == 0, number == last, classes) for number, each in enumerate(layers)]
        for each in layers:
            _refuse_unshareable(each, context)
        tie_all(layers, ties)
        return layers


def _flags_of(model: Any) -> str:
    """The flags of a model with their values, for an error in what it computes from them."""
    return " ".join(f"{flag(each.name)} {getattr(model, each.name)}" for each in fields(model))


def _refuse_shard_of_one(layers: Sequence[Layer]) -> None:
    """Raises ValueError for a module that `megasnn.shard` made two layers of, which would learn by themselves."""
    owner: dict[int, str] = {}
    for each in layers:
        for module in each.module.modules():
            mark = vars(module).get("made_from")
            if mark is not None and any(True for _ in tensors_of(module)):
                first = owner.setdefault(id(mark), each.name)
                if first != each.name:
                    raise ValueError(
                        f"{each.name} and {first} are made of the same {type(module).__name__} by megasnn.shard; give "
                        "it to shard once"
                    )


def _as_layer(each: Layer, context: BuildContext, first: bool, last: bool, classes: int) -> Layer:
    """The layer; of a plain module, made one that is whole on every tensor parallel rank."""
    for module in each.module.modules():
        if getattr(module, "inplace", False) is True:  # would change what other stages, and a second forward, take
            module.inplace = False  # type: ignore[assignment]
    try:
        if is_called_as_sharded(each.module):
            return replace(each, module=placed(each.module, each.name, first=first, last=last, classes=classes))
        if not is_plain(each.module):
            refuse_plain_parts(each.module)
            if each.initialise is not None:
                initialise_sharded(each.module, each.initialise)
            return each
        module = make_whole(each.module, context, first=first, last=last, initialise=each.initialise)
    except ValueError as error:
        raise ValueError(f"{each.name}: {error}") from error
    return replace(each, module=module)


def _refuse_unshareable(each: Layer, context: BuildContext) -> None:
    try:
        refuse_unshareable(each.module, context)
    except ValueError as error:
        raise ValueError(f"{each.name}: {error}") from error


def _build(run: Callable[..., Sequence[tuple[nn.Module, Bundle]]], context: BuildContext) -> Sequence[nn.Module]:
    """All layers for a rank. Raises ValueError for sizes that do not divide by the tensor parallel ranks."""
    return [module for module, _ in run(context, DRY_SAMPLES)]


def _built_and_run(
    model: ModelConfig,
    neuron: NeuronSpec,
    before: Sequence[Layer],
    recorded: Mapping[str, list[Event]],
    context: BuildContext,
    samples: int,
) -> Sequence[tuple[nn.Module, Bundle]]:
    """All layers for a rank, and what each of them gives in a dry run of so many samples.

    Args:
        before: the layers of one rank, and recorded: what they do with `DRY_SAMPLES` samples.
    """
    if samples != DRY_SAMPLES and context.tensor.size > 1:
        recorded = _recorded(model, neuron, samples)
    while True:
        layers = built(model, context, neuron)
        _refuse_made_before(before, layers)
        named = [(each.name, each.module) for each in layers]
        freeze(named, context.is_frozen)
        try:
            outputs = dry_run(
                named,
                _sources(layers),
                model.input_shape,
                context.compute_dtype,
                samples,
                learns=True,
                watch=partial(_tracker, recorded, context.tensor.size),
                replicated=context.data.size * context.context.size > 1,
            )
        except MixedChannels as error:
            # A module of a network given to `megasnn.shard` is made whole; of others nobody knows how.
            if error.path is None or error.path in context.replicated:
                raise
            context = replace(context, replicated=context.replicated | {error.path})
            continue
        _require_logits(model, layers[-1].name, outputs[-1], samples)
        return [(each.module, output) for each, output in zip(layers, outputs, strict=True)]


def _recorded(model: ModelConfig, neuron: NeuronSpec, samples: int) -> dict[str, list[Event]]:
    """What each layer does on one rank with so many samples."""
    layers, recorders = built(model, BuildContext(), neuron), dict[str, Recorder]()
    named, watch = [(each.name, each.module) for each in layers], partial(_recorder, recorders)
    dry_run(named, _sources(layers), model.input_shape, samples=samples, learns=True, watch=watch)
    return {name: recorder.events for name, recorder in recorders.items()}


def _recorder(recorders: dict[str, Recorder], name: str, layer: nn.Module) -> Recorder:
    return recorders.setdefault(name, Recorder(layer))


def _tracker(recorded: Mapping[str, list[Event]], size: int, name: str, layer: nn.Module) -> CutTracker | None:
    return None if size == 1 or is_whole(layer) else CutTracker(layer, recorded[name], size)


def dry_run(
    named_layers: Iterable[tuple[str, nn.Module]],
    taken: Sequence[Sequence[int]],
    input_shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    samples: int = DRY_SAMPLES,
    learns: bool = False,
    watch: Callable[[str, nn.Module], Recorder | CutTracker | None] = lambda name, layer: None,
    replicated: bool = False,
) -> list[Bundle]:
    """The outputs of layers on the meta device, one after another; the layers learn what their inputs hold.

    Args:
        taken: for each layer, the numbers of the layers whose outputs it takes.
        samples: how many there are.
        learns: whether the outputs show what needs a gradient.
        watch: gives what sees the functions of a layer's forward.
        replicated: whether other ranks run the same layers on other samples.
    Raises:
        MixedChannels: a layer would compute something else with a rank's channels.
        ValueError: a layer cannot take what it is given, changes what another one takes too, or gives no tensors; names
            the layer.
    """
    frames = say_input(frames_of(torch.empty((samples, *input_shape), dtype=dtype, device="meta"), input_shape))
    mark_replicated(frames)
    outputs: list[Bundle] = []
    with showing_need_of_gradient() if learns else torch.no_grad(), Holding():
        for (name, layer), numbers in zip(named_layers, taken, strict=True):
            inputs = [frames if number == INPUT else outputs[number] for number in numbers]
            before, buffers = _versions(inputs), dict(_buffers(layer))
            watching = watch(name, layer)
            try:
                with one_height(layer), watching or nullcontext():
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
                text = f"{name}, given {shapes_text(*inputs)}: {explained(error, layer, len(inputs))}"
                if isinstance(error, MixedChannels) and watching is not None and is_called_as_sharded(layer):
                    path = watching.path if error.path is None else error.path
                    raise MixedChannels(text, ".".join(filter(None, (name, path)))) from error
                raise ValueError(text) from error
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
    """How often each tensor was changed in place."""
    return [entry._version for output in outputs for entry in entries_of(output).values()]
