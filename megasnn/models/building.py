"""From a model's dimensions to its description: its layers are built without memory, and run once without values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from megasnn.comm.codec import Content
from megasnn.comm.group import Group
from megasnn.config import ModelConfig
from megasnn.kernels import NeuronSpec
from megasnn.layers.channels import of_signals
from megasnn.layers.context import BuildContext, building
from megasnn.layers.holding import Holding, content_of
from megasnn.layers.own_values import without_memory
from megasnn.layers.whole import (
    SHARDED,
    apply_layer,
    is_called_as_sharded,
    is_plain,
    make_whole,
    placed,
    refuse_plain_parts,
)
from megasnn.models.description import LayerDescription, ModelDescription, frames_of
from megasnn.models.layer import Layer
from megasnn.sharding import sharded_tensors

_SAMPLES = 2  # of the dry run: a norm in training needs more than one value


def describe(model: ModelConfig, neuron: NeuronSpec | None = None) -> ModelDescription:
    """The layers of a model with these dimensions and neurons.

    Args:
        neuron: None for what the model takes by default.
    Raises:
        ValueError: two layers have the same name, a layer cannot take what the one before it gives or gives something
            else than it says, or the last one gives no logits.
    """
    neuron = neuron or model.neuron().spec
    layers = built(model, BuildContext(), neuron)
    names = [each.name for each in layers]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"two layers of {model.name} have the name {twice[0]!r}; a name is for one layer")
    _refuse_shared(layers)
    _refuse_made_before(layers, built(model, BuildContext(), neuron))
    named = [(each.name, each.module) for each in layers]
    try:
        list(sharded_tensors(named))
    except ValueError as error:
        raise ValueError(
            f"{error}; a plain module with parameters inside a layer of MegaSNN's layers cannot be cut: use "
            "ParallelConv, ParallelLinear or ParallelBatchNorm, or make it a layer of its own"
        ) from None
    outputs = dry_run(named, model.input_shape, time_steps=model.time_steps)
    _require_logits(model, names[-1], outputs[-1])
    described = [
        LayerDescription(each.name, each.unit, _content(each, y)) for each, y in zip(layers, outputs, strict=True)
    ]
    build = partial(_build, model, neuron)
    return ModelDescription(tuple(described), build, model.time_steps, model.input_shape, model.num_classes)


def _require_logits(model: ModelConfig, name: str, output: Tensor) -> None:
    """Raises ValueError for a last layer that gives something else."""
    wanted = [model.time_steps, _SAMPLES, model.num_classes]
    if list(output.shape) != wanted:
        raise ValueError(
            f"{name}: the last layer gives {list(output.shape)} for {_SAMPLES} samples, where logits are {wanted}: "
            "--time-steps, samples, --num-classes"
        )


def _refuse_shared(layers: Sequence[Layer]) -> None:
    """Raises ValueError for a module that is in two layers: it would be trained and saved twice."""
    owner: dict[int, str] = {}
    for each in layers:
        for module in each.module.modules():
            has_tensors = any(True for _ in chain(module.parameters(recurse=False), module.buffers(recurse=False)))
            made_from = id(vars(module).get("made_from", module))
            if has_tensors and owner.setdefault(made_from, each.name) != each.name:
                raise ValueError(
                    f"{each.name} and {owner[made_from]} have the same {type(module).__name__} inside; a module is "
                    "for one layer"
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


def _content(each: Layer, output: Tensor) -> Content:
    """What a layer says that its output holds. Raises ValueError where the dry run shows values that do not fit."""
    found = content_of(output)
    said = found if each.holds is None else each.holds
    if said is Content.SPIKES and found is Content.COUNTS:
        raise ValueError(f"{each.name}: holds=SPIKES, but its output can be larger than 1; say COUNTS, or nothing")
    return said


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
            flags = f" ({_flags_of(model)})" if isinstance(error, ArithmeticError) else ""
            raise ValueError(f"{place}: {error}{flags}") from error
        if not layers:
            raise ValueError("`layers` yields nothing: a model has one layer or more, the last of which gives logits")
        classes = model.num_classes
        return [_as_layer(each, context, each is layers[0], each is layers[-1], classes) for each in layers]


def _flags_of(model: Any) -> str:
    """The flags of a model with their values, for an error in what it computes from them."""
    return " ".join(f"--{each.name.replace('_', '-')} {getattr(model, each.name)}" for each in fields(model))


def _as_layer(each: Layer, context: BuildContext, first: bool, last: bool, classes: int) -> Layer:
    """The layer; of a plain module, made one that is whole on every tensor parallel rank."""
    try:
        if is_called_as_sharded(each.module):
            return replace(each, module=placed(each.module, each.name, first=first, last=last, classes=classes))
        if not is_plain(each.module):
            refuse_plain_parts(each.module)
            if each.initialise is not None:
                raise ValueError("initialise=... is for plain modules; layers of MegaSNN are given it themselves")
            return each
        module = make_whole(each.module, context, first=first, last=last, initialise=each.initialise)
    except ValueError as error:
        raise ValueError(f"{each.name}: {error}") from error
    return replace(each, module=module)


def _build(model: ModelConfig, neuron: NeuronSpec, context: BuildContext) -> Sequence[nn.Module]:
    """All layers for a rank. Raises ValueError for sizes that do not divide by the tensor parallel ranks."""
    layers = [(each.name, each.module) for each in built(model, context, neuron)]
    cut = context.tensor.size > 1
    outputs = dry_run(layers, model.input_shape, context.compute_dtype, cut, model.time_steps)
    _require_logits(model, layers[-1][0], outputs[-1])
    return [module for _, module in layers]


def dry_run(
    named_layers: Iterable[tuple[str, nn.Module]],
    input_shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    cut: bool = False,
    time_steps: int = 1,
) -> list[Tensor]:
    """The outputs of layers on the meta device, one after another; the layers learn what their inputs hold.

    Args:
        cut: whether channels are shared out over tensor parallel ranks.
        time_steps: of the model.
    Raises:
        ValueError: a layer cannot take what the one before it gives; names the layer.
    """
    x = frames_of(torch.empty((_SAMPLES, *input_shape), dtype=dtype, device="meta"), input_shape)
    outputs = []
    signals = time_steps if len(input_shape) == 2 else None
    with torch.no_grad(), Holding(cut), of_signals(signals):
        for name, layer in named_layers:
            try:
                x = apply_layer(layer, x, range(_SAMPLES))
            except Exception as error:
                raise ValueError(f"{name}, given {list(x.shape)}: {error}") from error
            outputs.append(x)
    return outputs


def building_problems(model: ModelConfig, neuron: NeuronSpec, tensor_parallel: int) -> list[str]:
    """What is wrong with a model, found out by building its layers for the first of so many tensor parallel ranks."""
    first = BuildContext(tensor=Group("tensor", tuple(range(tensor_parallel))))
    try:
        describe(model, neuron).build(first)
    except ValueError as error:
        return [f"{model.name}: {error}"]
    return []
