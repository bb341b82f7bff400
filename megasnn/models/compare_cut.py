"""Compares layers of one's own, which have a rank's channels, with the whole ones, on small random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megasnn.bundle import Bundle, bundle_of, entries_of, map_entries
from megasnn.layers.channels import UNMARKED, Cut, cut_of
from megasnn.layers.context import BuildContext
from megasnn.layers.cut_tracking import is_ours
from megasnn.layers.holding import largest_of
from megasnn.layers.own_values import tensors_of
from megasnn.layers.plain import is_channelwise
from megasnn.layers.whole import apply_layer, is_whole
from megasnn.models.description import DRY_SAMPLES, INPUT, ModelDescription, frames_of
from megasnn.parallel.sharding import materialise
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
    exact = BuildContext(
        tensor=context.tensor,
        dtype=torch.float64,
        compute_dtype=torch.float64,
        neuron_backend="torch",
        time_steps=context.time_steps,
        seed=context.seed,
    )
    if context.tensor.size == 1 or model.dry_run is None:
        return
    cut = model.dry_run(exact, DRY_SAMPLES)
    if all(_is_known(layer) for layer, _ in cut):
        return
    whole = model.dry_run(replace(exact, tensor=BuildContext().tensor), DRY_SAMPLES)
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
        cuts = [[None] if source == INPUT else _cuts(cut[source][1]) for source in sources]
        problem = _difference(layers, shown, cuts, _cuts(cut[number][1]), exact, keyed_generator(seed, "compare", name))
        if problem is not None:
            raise ValueError(
                f"{name}: with --tensor-model-parallel-size {context.tensor.size} its {problem} those of one rank on "
                "random numbers, by more than rounding: its forward mixes channels, or depends on their number"
            )


def _is_known(layer: nn.Module) -> bool:
    """Tells whether a layer is ours, or plain and whole on every rank."""
    return is_whole(layer) or all(is_ours(each) or is_channelwise(each) for each in layer.modules())


def _cuts(output: Bundle) -> list[Cut | None]:
    return [None if cut_of(x) is UNMARKED else cut_of(x) for x in entries_of(output).values()]


def _difference(
    layers: tuple[nn.Module, nn.Module],
    shown: Sequence[Bundle],
    input_cuts: Sequence[Sequence[Cut | None]],
    output_cuts: Sequence[Cut | None],
    context: BuildContext,
    generator: torch.Generator,
) -> str | None:
    """Says what differs between a layer with a rank's channels and the whole one; None where nothing does.

    Args:
        layers: these two. shown: what the whole one is given in the dry run.
        input_cuts, output_cuts: of every entry of every input, and of the output.
    """
    group = context.tensor

    def part(x: Tensor, cut: Cut | None) -> Tensor:
        if cut is None:
            return x
        blocks = x.unflatten(cut.dim, (cut.blocks, group.size, -1)).select(cut.dim + 1, group.rank)
        return blocks.flatten(cut.dim, cut.dim + 1)

    device = next((x.device for x in tensors_of(layers[0])), torch.device("cpu"))
    full = [map_entries(lambda x: _random(x, generator).to(device), each) for each in shown]
    parts = [
        bundle_of({key: part(x, cut) for (key, x), cut in zip(entries_of(each).items(), cuts, strict=True)})
        for each, cuts in zip(full, input_cuts, strict=True)
    ]
    (of_full, y_full), (of_parts, y_parts) = _run(layers[1], full), _run(layers[0], parts)
    if not all(_equal(x, part(y, cut)) for x, y, cut in zip(y_parts, y_full, output_cuts, strict=True)):
        return "outputs differ from"
    weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(device) for y in y_full]
    of_rank = [part(each, cut) for each, cut in zip(weights, output_cuts, strict=True)]
    gradients = zip(_gradients(y_parts, of_rank, of_parts), _gradients(y_full, weights, of_full), strict=True)
    cuts = [cut for each in input_cuts for cut in each]
    same = all(_equal(x, part(y, cut)) for (x, y), cut in zip(gradients, cuts, strict=True))
    return None if same else "input gradients differ from"


def _run(layer: nn.Module, inputs: Sequence[Bundle]) -> tuple[list[Tensor], list[Tensor]]:
    """The entries of a layer's inputs, which need gradients, and of its output."""
    given = [map_entries(lambda x: x.detach().clone().requires_grad_(x.is_floating_point()), each) for each in inputs]
    with torch.enable_grad():
        output = apply_layer(layer, given[0], range(DRY_SAMPLES), *given[1:])
    return [x for each in given for x in entries_of(each).values()], list(entries_of(output).values())


def _gradients(outputs: Sequence[Tensor], weights: Sequence[Tensor], entries: Sequence[Tensor]) -> list[Tensor]:
    """Of a weighted sum of outputs, for each entry of the inputs; zeros where there is none."""
    for y, weight in zip(outputs, weights, strict=True):
        if y.requires_grad:
            y.backward(weight, retain_graph=True)
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in entries]


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    """Values like those of a layer's output: spikes and counts where it gives them, normal numbers otherwise."""
    largest = 1 if like.dtype == torch.bool else largest_of(like)
    if largest is None and like.is_floating_point():
        return torch.randn(like.shape, generator=generator, dtype=torch.float64)
    drawn = torch.randint(0, (largest or 1) + 1, like.shape, generator=generator)
    return drawn.to(torch.float64 if like.is_floating_point() else like.dtype)


def _equal(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and bool((x - y).abs().max() <= TOLERANCE * y.abs().max())
