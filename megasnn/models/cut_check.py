"""Check that layers of which a rank has its channels compute what they do with all of them.

Layers of MegaSNN exchange what they need, and so do those that are whole on every rank. Any other is run once before
training: each tensor parallel rank computes it with all channels and with its own, in float64 on the same random
numbers. Its output and all gradients are to be those of one rank, or the rank's part of them. No neuron hides anything
by being silent: values and rates rise over the channels, and surrogate gradients show the potentials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megasnn.bundle import Bundle, entries_of, map_entries
from megasnn.kernels.spike_codec import Content
from megasnn.layers.blocks import ConvNormNeuron
from megasnn.layers.context import BuildContext
from megasnn.layers.conv import ParallelConv
from megasnn.layers.linear import MeanLinear, ParallelLinear
from megasnn.layers.neuron import SpikingNeuron
from megasnn.layers.norm import ParallelBatchNorm
from megasnn.layers.replicated import apply_layer, is_whole
from megasnn.layers.shape_inference import content_of, is_ours, max_of
from megasnn.layers.weight_grad import CastWeights, WeightGradients
from megasnn.models.description import DRY_SAMPLES, Built, Cuts, ModelDescription
from megasnn.models.layer import FunctionLayer
from megasnn.parallel.agreement import gather
from megasnn.parallel.collectives import all_reduce_sum
from megasnn.parallel.sharding import Cut, Shard, materialise
from megasnn.parallel_state import Group, alone

TOLERANCE = 1e-9  # relative to the largest value, in float64


class MixedChannels(ValueError):
    """A layer, by its name, that computes something else where a rank has some of the channels."""

    def __init__(self, problem: str, size: int) -> None:
        super().__init__(
            f"{problem}: with --tensor-model-parallel-size {size} a rank has its own channels only; set it to 1, or "
            "put what mixes channels into a plain module of your own that is a layer by itself"
        )


def check_cut_layers(
    described: ModelDescription,
    context: BuildContext,
    built: Sequence[Built],
    numbers: Sequence[int],
    device: torch.device,
) -> None:
    """Checks layers of this rank. Collective over the tensor parallel group.

    Args:
        built: all layers for this rank. numbers: those that are checked.
    Raises:
        MixedChannels: on every rank, for the first layer that computes something else with a rank's channels.
    """
    tp, inputs = context.tp, [_entries(built, sources) for sources in described.inputs]
    suspects = [n for n in numbers if tp.size > 1 and not is_trusted(built[n].module, inputs[n])]
    if not suspects:
        return
    wide = replace(
        context,
        dtype=torch.float64,
        compute_dtype=torch.float64,
        neuron_backend="torch",
        dp=alone("dp"),
        dp_shard=alone("dp_shard"),
        cp=alone("cp"),
        weight_gradients=WeightGradients(),
        cast_weights=CastWeights(),
    )
    reference, cut = described.build(replace(wide, tp=alone("tp"))), described.build(wide)
    outputs = {number: each.output for number, each in enumerate(reference)}
    examples = described.task.examples(DRY_SAMPLES, torch.float64)
    for number, (spec, x) in enumerate(zip(described.task.inputs.values(), examples.values(), strict=True)):
        outputs[-1 - number] = spec.frames(x)
    for number in suspects:
        name, pair = built[number].name, (reference[number].module, cut[number].module)
        for layer in pair:
            fill(name, layer, device)
        given = [outputs[source] for source in described.inputs[number]]
        problem = difference(*pair, given, [cut for _, cut in inputs[number]], tp, device, cut[number].cuts)
        for found in filter(None, gather(tp.handle, problem)):
            raise MixedChannels(f"{name}: {found}", tp.size)
        for layer in pair:
            layer.to("meta")  # its memory is free


def _entries(built: Sequence[Built], sources: Sequence[int]) -> list[tuple[Tensor | None, Cut | None]]:
    """Inputs of a layer, and how ranks cut them; None for the model's input."""
    found: list[tuple[Tensor | None, Cut | None]] = []
    for source in sources:
        if source < 0:
            found.append((None, None))
        else:
            found += zip(entries_of(built[source].output).values(), built[source].cuts, strict=True)
    return found


def is_known(layer: nn.Module) -> bool:
    """Tells whether a module is MegaSNN's with all in it."""
    return all(
        getattr(each.forward, "func", each.forward).__module__.startswith("megasnn.")
        and not isinstance(each, FunctionLayer)
        and (is_ours(each) or not isinstance(each, SpikingNeuron))
        and not each._forward_hooks
        and not each._forward_pre_hooks
        for each in layer.modules()
    )


def is_trusted(layer: nn.Module, inputs: Sequence[tuple[Tensor | None, Cut | None]]) -> bool:
    """Tells whether a layer needs no check: it is whole, or MegaSNN's and is given what it is made for.

    Args:
        inputs: what it takes, None for the model's input, and how ranks cut it.
    """
    if is_whole(layer) or not is_known(layer):
        return is_whole(layer)
    if isinstance(layer, ParallelLinear) and not isinstance(layer, MeanLinear):
        return all(x is not None and x.ndim == 3 and cut == Cut(2) for x, cut in inputs)
    if isinstance(layer, ParallelBatchNorm) and blocks_of(layer) > 1:
        return False
    begins = isinstance(layer, (ConvNormNeuron, ParallelConv)) or type(layer).__module__.startswith("megasnn.models.")
    return all(cut == Cut(2) or (x is None and begins) for x, cut in inputs)


# --- cuts of tensors


def cuts_by_shape(name: str, layer: nn.Module, output: Bundle, one: Bundle, cuts: Cuts, size: int) -> Cuts:
    """How ranks cut the output of a layer, by its shapes for a rank and for one rank; the check proves it.

    Args:
        cuts: of its inputs.
    """
    blocks = blocks_of(layer, cuts) if is_known(layer) else 1
    pairs = zip(entries_of(output).values(), entries_of(one).values(), strict=True)
    try:
        found = [cut_by_shape(local, whole, size, blocks) for local, whole in pairs]
    except ValueError as error:
        raise MixedChannels(f"{name}: {error}", size) from error
    if any(cut is not None and cut.dim < 2 for cut in found):
        raise MixedChannels(f"{name}: a rank's channels are not behind samples", size)
    return found


def blocks_of(module: nn.Module, cuts: Cuts = ()) -> int:
    """Number of blocks that the output channels of a module of ours consist of: as its last part says, or else as in
    its inputs."""
    shards = [shard for each in module.modules() for shard in _shards(each).values()]
    said = [cut.blocks for shard in shards for axis, cut in shard.cuts if axis == "tp" and cut.dim == 0]
    return [1, *(cut.blocks for cut in cuts[:1] if cut is not None), *said][-1]


def cut_by_shape(local: Tensor, whole: Tensor, size: int, blocks: int = 1) -> Cut | None:
    """The cut of a tensor that has one dimension smaller by the number of ranks. Raises ValueError for other shapes."""
    if local.shape == whole.shape:
        return None
    smaller = [dim for dim, (here, there) in enumerate(zip(local.shape, whole.shape, strict=False)) if here != there]
    if local.ndim != whole.ndim or len(smaller) != 1 or local.shape[smaller[0]] * size != whole.shape[smaller[0]]:
        raise ValueError(f"it has the shape {list(local.shape)}, and on one rank {list(whole.shape)}")
    return Cut(smaller[0], blocks)


def part(x: Tensor, cut: Cut | None, group: Group) -> Tensor:
    """A rank's part of a whole tensor."""
    if cut is None:
        return x
    blocks = x.unflatten(cut.dim, (cut.blocks, group.size, -1)).select(cut.dim + 1, group.rank)
    return blocks.flatten(cut.dim, cut.dim + 1)


def _shards(module: nn.Module) -> dict[str, Shard]:
    found: dict[str, Shard] = vars(module).get("_described_shards", {})
    return found


# --- the comparison


class _Run(NamedTuple):
    leaves: list[Tensor]
    outputs: list[Tensor]


def difference(
    reference: nn.Module,
    layer: nn.Module,
    inputs: Sequence[Bundle],
    cuts: Cuts,
    group: Group,
    device: torch.device,
    of_outputs: Cuts | None = None,
) -> str | None:
    """Tells what a layer computes otherwise with a rank's channels than with all of them; None for nothing.

    Args:
        inputs: what it takes, on the meta device or an example; of all ranks together.
        cuts: of the inputs' entries. of_outputs: of the outputs'; None for what their shapes say.
    """
    draws = torch.Generator().manual_seed(0)
    shown = [entry for each in inputs for entry in entries_of(each).values()]
    values = [_example(entry, cut, draws).to(device) for entry, cut in zip(shown, cuts, strict=True)]
    whole = _forward(reference, inputs, values)
    own = _forward(layer, inputs, [part(x, cut, group) for x, cut in zip(values, cuts, strict=True)])
    if of_outputs is None:
        of_outputs = [cut_by_shape(y, z, group.size) for y, z in zip(own.outputs, whole.outputs, strict=True)]
    losses = [torch.zeros((), dtype=torch.float64, device=device) for _ in range(2)]
    problem = None
    for y, expected, cut in zip(own.outputs, whole.outputs, of_outputs, strict=True):
        if not _are_equal(y, part(expected, cut, group)):
            problem = "its output is no part of the one that one rank has"
        weights = torch.randn(expected.shape, generator=draws, dtype=torch.float64).to(device)
        for index, (each, factors) in enumerate(((y, part(weights, cut, group)), (expected, weights))):
            if each.requires_grad:
                losses[index] = losses[index] + (each * factors).sum()
    for loss in losses:  # also behind a problem, since other ranks may have none and wait in backward
        if loss.requires_grad:
            loss.backward()
    gradients = [
        (_grad(x), part(_grad(y), cut, group)) for x, y, cut in zip(own.leaves, whole.leaves, cuts, strict=True)
    ]
    gradients += _of_parameters(reference, layer, group)
    least = TOLERANCE * 1e-3 * max(float(expected.abs().max()) for _, expected in gradients if expected.numel())
    if problem is None and not all(_are_equal(found, expected, least) for found, expected in gradients):
        problem = "gradients are no part of those that one rank has"
    return problem


def _forward(layer: nn.Module, inputs: Sequence[Bundle], values: Sequence[Tensor]) -> _Run:
    shown = [entry for each in inputs for entry in entries_of(each).values()]
    leaves = [x.clone().requires_grad_(_learns(like)) for x, like in zip(values, shown, strict=True)]
    given = iter(leaves)
    bundles = [map_entries(lambda _: next(given), each) for each in inputs]
    output = apply_layer(layer, bundles[0], range(DRY_SAMPLES), *bundles[1:])
    return _Run(leaves, list(entries_of(output).values()))


def _of_parameters(reference: nn.Module, layer: nn.Module, group: Group) -> list[tuple[Tensor, Tensor]]:
    """Gradients of parameters, and what they are to be: this rank's part of one rank's."""
    found = []
    for path, module in layer.named_modules():
        of_one = reference.get_submodule(path)._parameters
        for name, shard in _shards(module).items():
            mine, whole = module._parameters.get(name), of_one.get(name)
            if mine is not None and whole is not None and mine.requires_grad:
                gradient = _grad(mine)
                if shard.partial_gradient:
                    all_reduce_sum(gradient, group, "backward")
                found.append((gradient, shard.cut(_grad(whole))))
    return found


def _learns(like: Tensor) -> bool:
    """Tells whether a layer's output may need a gradient, unlike an example of the model's input."""
    return like.is_meta and like.is_floating_point()


def _grad(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


def _are_equal(local: Tensor, whole: Tensor, least: float = 1e-12) -> bool:
    local, whole = local.detach().double(), whole.detach().double()
    largest = float(whole.nan_to_num(0, 0, 0).abs().max()) if whole.numel() else 0.0
    is_alike = local.shape == whole.shape
    return is_alike and torch.allclose(local, whole, rtol=0.0, atol=TOLERANCE * largest + least, equal_nan=True)


def _example(like: Tensor, cut: Cut | None, draws: torch.Generator) -> Tensor:
    """Random numbers of what a tensor holds: larger for later channels, or more often spikes."""
    if not like.is_meta:
        return like
    dim = 2 if cut is None else cut.dim
    length = like.shape[dim] if like.ndim > dim else 1
    rising = torch.linspace(0, 1, length, dtype=torch.float64).view(-1, *[1] * max(like.ndim - dim - 1, 0))
    if like.is_floating_point() and content_of(like) is Content.DENSE:
        return torch.randn(like.shape, generator=draws, dtype=torch.float64) * (1 + 3 * rising)
    counts = (torch.rand(like.shape, generator=draws) * (max_of(like) or 1)).ceil()
    spikes = counts * (torch.rand(like.shape, generator=draws) < rising)
    return spikes.to(torch.float64 if like.is_floating_point() else like.dtype)


def fill(name: str, layer: nn.Module, device: torch.device) -> None:
    for module in layer.modules():
        shards = _shards(module)
        shards.update({each: replace(shard, initialise=_rising) for each, shard in shards.items()})
    materialise([(name, layer)], device, seed=0)


def _rising(tensor: Tensor, generator: torch.Generator) -> None:
    """Values with which channels are silent first, and then fire at higher and higher rates."""
    if tensor.ndim > 1:
        tensor.normal_(0, tensor[0].numel() ** -0.5, generator=generator)
    elif tensor.is_floating_point():
        tensor.copy_(torch.linspace(0.1, 2, tensor.numel()).view_as(tensor))
    else:
        tensor.zero_()
