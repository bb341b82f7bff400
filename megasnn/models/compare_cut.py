"""Compares layers of one's own, which have a rank's channels, with the whole ones, on small random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from megasnn.bundle import Bundle, entries_of, map_entries
from megasnn.layers.context import BuildContext
from megasnn.layers.plain import is_channelwise
from megasnn.layers.replicated import apply_layer, is_replicated_layer
from megasnn.layers.shape_inference import UNMARKED, Cut, cut_of, is_ours, max_of
from megasnn.models.description import DRY_SAMPLES, INPUT, ModelDescription, frames_of
from megasnn.parallel.sharding import materialise
from megasnn.parallel_state import Group
from megasnn.random import keyed_generator

TOLERANCE = 1e-9  # of float64, relative to the largest value


def compare_with_whole(
    model: ModelDescription, context: BuildContext, numbers: Iterable[int], device: torch.device, seed: int = 0
) -> None:
    """Runs layers forward and backward in float64 with a rank's channels and with all of them.

    Outputs and input gradients must be equal. Every tensor-parallel rank calls this with the same layers. MegaSNN's own
    are not compared; of equal layers with equal inputs the first one is.

    Args:
        numbers: of the layers.
    Raises:
        ValueError: names a layer that computes something else.
    """
    if context.tp.size == 1 or model.dry_run is None:
        return
    exact = BuildContext(
        tp=context.tp,
        dtype=torch.float64,
        compute_dtype=torch.float64,
        neuron_backend="torch",
        time_steps=context.time_steps,
        seed=context.seed,
    )
    cut = model.dry_run(exact, DRY_SAMPLES)
    if all(_is_known(layer) for layer, _ in cut):
        return
    whole = model.dry_run(replace(exact, tp=BuildContext().tp), DRY_SAMPLES)
    image = frames_of(torch.empty(DRY_SAMPLES, *model.input_shape, device="meta"), model.input_shape)
    compared = set[str]()
    for number in numbers:
        name, sources = model.layers[number].name, model.inputs[number]
        layers = cut[number][0], whole[number][0]
        shown = [image if source == INPUT else whole[source][1] for source in sources]
        kind = f"{layers[0]} {[[x.shape for x in entries_of(each).values()] for each in shown]}"
        if _is_known(layers[0]) or kind in compared:
            continue
        compared.add(kind)
        for layer in layers:
            materialise([(name, layer)], device, seed)
        draw = partial(_random, keyed_generator(seed, "compare", name), device)
        inputs = [map_entries(draw, each) for each in shown]
        input_cuts = [c for source in sources for c in ([None] if source == INPUT else _cuts(cut[source][1]))]
        output_cuts = _cuts(cut[number][1])
        expected, found = (
            _outputs_and_gradients(layer, inputs, *cuts, exact.tp, keyed_generator(seed, "weights", name))
            for layer, cuts in ((layers[1], ([], [])), (layers[0], (input_cuts, output_cuts)))
        )
        for x, y, each in zip(found, expected, [*output_cuts, *input_cuts], strict=True):
            part = _part(y, each, exact.tp)
            if x.shape != part.shape or (x - part).abs().max() > TOLERANCE * part.abs().max():
                raise ValueError(
                    f"{name}: with --tensor-model-parallel-size {context.tp.size} its outputs or gradients "
                    "differ from those of one rank on random numbers, by more than rounding: its forward mixes "
                    "channels, or depends on their number"
                )


def _is_known(layer: nn.Module) -> bool:
    """Tells whether a layer is ours, or plain and whole on every rank."""
    return is_replicated_layer(layer) or all(is_ours(each) or is_channelwise(each) for each in layer.modules())


def _cuts(output: Bundle) -> list[Cut | None]:
    return [None if cut_of(x) is UNMARKED else cut_of(x) for x in entries_of(output).values()]


def _part(x: Tensor, cut: Cut | None, group: Group) -> Tensor:
    """This rank's part of a whole tensor."""
    if cut is None:
        return x
    blocks = x.unflatten(cut.dim, (cut.blocks, group.size, -1)).select(cut.dim + 1, group.rank)
    return blocks.flatten(cut.dim, cut.dim + 1)


def _outputs_and_gradients(
    layer: nn.Module,
    inputs: Sequence[Bundle],
    input_cuts: Sequence[Cut | None],
    output_cuts: Sequence[Cut | None],
    group: Group,
    generator: torch.Generator,
) -> list[Tensor]:
    """The entries of a layer's output, and the gradients, of a random sum of these, for the entries of its inputs.

    Args:
        inputs: whole. input_cuts, output_cuts: of all their entries, for a layer with a rank's channels; or empty.
    """
    cuts = iter(input_cuts)

    def leaf(x: Tensor) -> Tensor:
        own = _part(x, next(cuts), group) if input_cuts else x
        return own.detach().clone().requires_grad_(own.is_floating_point())

    given = [map_entries(leaf, each) for each in inputs]
    with torch.enable_grad():
        output = apply_layer(layer, given[0], range(DRY_SAMPLES), *given[1:])
    outputs = list(entries_of(output).values())
    for number, y in enumerate(outputs):
        cut, shape = output_cuts[number] if output_cuts else None, list(y.shape)
        if cut is not None:
            shape[cut.dim] *= group.size
        weights = torch.randn(shape, generator=generator, dtype=torch.float64).to(y.device)
        if y.requires_grad:
            y.backward(_part(weights, cut, group), retain_graph=True)
    leaves = [x for each in given for x in entries_of(each).values()]
    return outputs + [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


def _random(generator: torch.Generator, device: torch.device, like: Tensor) -> Tensor:
    """Values like those of a layer's output: spikes and counts where it gives them, normal numbers otherwise."""
    largest = 1 if like.dtype == torch.bool else max_of(like)
    if largest is None and like.is_floating_point():
        return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(device)
    drawn = torch.randint(0, (largest or 1) + 1, like.shape, generator=generator)
    return drawn.to(device, torch.float64 if like.is_floating_point() else like.dtype)
