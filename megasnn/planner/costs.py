"""A rank's costs for one micro-batch through each layer, at any size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megasnn.common.grid import ContextCut
from megasnn.pipeline.cost_model import LayerCost, LinkCost, for_samples
from megasnn.planner.costs_file import ADVICE, Analysis, CutAxis, LayoutBytes, ResidentTensor, Seconds
from megasnn.planner.machines import Machine

BYTE_FIELDS = "held", "message", "gradient", "output", "deferred", "found", "cast"


@dataclass(frozen=True)
class LayerShare:
    """A rank's share in each layer and micro-batch.

    Attributes:
        cut: how context parallel ranks share a micro-batch.
        samples: on this rank.
        ranks: computing on the node at the same time.
    """

    tensor: int
    context: int
    cut: ContextCut
    samples: int
    ranks: int


def layer_costs(
    analysis: Analysis, machine: Machine, share: LayerShare, link: LinkCost, has_graphs: bool = False
) -> tuple[LayerCost, ...]:
    """Bytes and seconds by layer. Raises ValueError for an impossible size.

    Args:
        link: slowest link between ranks that share layers.
        has_graphs: seconds in CUDA graphs, where `machine` has figures for them.
    """
    costs = counted_costs(analysis, share)
    if has_graphs and machine.graph_start is not None:
        # A graph launches its kernels without Python.
        machine = replace(machine, least=0.0, start=machine.graph_start)
    seconds = _computed(analysis, machine, costs, share)
    if analysis.timed:
        # Ranks that compute at the same time share the memory's bandwidth: the nearest number of them was measured.
        timed = min(analysis.timed, key=lambda each: abs(each.ranks - share.ranks))
        of_timed = LayerShare(1, 1, "samples", timed.samples, timed.ranks)
        then = _computed(analysis, machine, counted_costs(analysis, of_timed), of_timed)
        seconds = [_scaled(*each) for each in zip(timed.seconds, seconds, then, strict=True)]
    found = []
    for cost, (forward, inputs, weights) in zip(costs, seconds, strict=True):
        # Exchanges hold up the layer. Most of their bytes are gradients, so all are charged to the input gradient.
        waits = 0.0
        if cost.collectives:
            waits = cost.collectives * link.latency + cost.exchanged * link.per_byte
        found.append(replace(cost, forward=forward, input_gradient=inputs + waits, weight_gradient=weights))
    return tuple(found)


def _computed(analysis: Analysis, machine: Machine, costs: Sequence[LayerCost], share: LayerShare) -> list[Seconds]:
    """Seconds by layer at the machine's rates."""
    found = []
    rate = machine.operations.get(analysis.precision, machine.operations["fp32"])
    for number, (layer, cost) in enumerate(zip(analysis.layers, costs, strict=True)):
        is_cut = share.cut == "tokens" or (share.cut == "rows" and layer.rows > 1)
        parts = share.context if is_cut else 1
        product = layer.operations * share.samples / share.tensor / parts / rate
        # The first layer needs no gradient of its input.
        product_of_inputs = product if number else 0.0
        moved = (3 * cost.held + cost.output) / machine.moved
        moved_for_weights = cost.held / machine.moved
        forward = machine.start + max(machine.least, product + moved)
        inputs = machine.start + max(machine.least, product_of_inputs + moved)
        weights = machine.start + max(machine.least, product + moved_for_weights)
        found.append((forward, inputs, weights))
    return found


def _scaled(measured: Seconds, computed: Seconds, before: Seconds) -> Seconds:
    """Measured seconds, scaled by the computed ones for this share and for the measured share."""
    scaled = []
    for each, now, then in zip(measured, computed, before, strict=True):
        ratio = now / then if then else 1.0
        scaled.append(each * ratio)
    forward, inputs, weights = scaled
    return forward, inputs, weights


def counted_costs(analysis: Analysis, share: LayerShare) -> list[LayerCost]:
    """Bytes and exchanges by layer; seconds are 0. Raises ValueError for an impossible size.

    Where two axes share a layer, their fractions multiply.
    """
    alone = _at(analysis, share, analysis.alone)
    axes: list[tuple[CutAxis, int]] = [("tensor", share.tensor), (share.cut, share.context)]
    shared = [_shared(analysis, share, alone, axis, size) for axis, size in axes if size > 1]
    if not shared:
        return alone
    if len(shared) == 1:
        return shared[0]
    # Tensor parallel exchanges were counted for the rank's own samples, and for all rows or tokens.
    parts = share.context if share.cut != "samples" else 1
    found = []
    for whole, tensor, context in zip(alone, *shared, strict=True):
        both = _each(_of_both_cuts, whole, tensor, context)
        both["exchanged"] = tensor.exchanged // parts + context.exchanged // share.tensor
        found.append(replace(whole, collectives=tensor.collectives + context.collectives, **both))
    return found


def _of_both_cuts(whole: int, one: int, other: int) -> int:
    if not whole:
        return one + other
    # Rounded up: uneven shares leave more to the largest rank.
    return -(-one * other // whole)


def _shared(
    analysis: Analysis, share: LayerShare, alone: Sequence[LayerCost], axis: CutAxis, size: int
) -> list[LayerCost]:
    """Bytes and exchanges where ranks share layers along one axis.

    Other sizes follow from one rank and the counted size. One of n shares takes:

    - by channels, whole + cut / n bytes;
    - by rows, cut / n bytes and the neighbours' rows;
    - by tokens, see `_by_tokens`;
    - by samples, its samples' bytes, and the norms' statistics and exchanges at any number of samples.
    """
    counted = _counted(analysis, axis, size)
    if axis == "tokens":
        return _by_tokens(analysis, share, alone)
    at = counted.tensor * counted.context
    # A rank receives the other ranks' part of all bytes.
    received = (1 - 1 / size) / (1 - 1 / at)

    def of_channels(one: int, some: int) -> int:
        cut = (one - some) / (1 - 1 / at)
        return max(0, round(one - cut + cut / size))

    def of_rows(one: int, some: int) -> int:
        neighbours = max(some - one / at, 0)
        return round(neighbours + one / size)

    found = []
    for one, some in zip(alone, _at(analysis, share, counted), strict=True):
        if axis == "samples":
            exchanged = (size - 1) * some.exchanged
            found.append(
                replace(one, held=some.held, found=some.found, exchanged=exchanged, collectives=some.collectives)
            )
        elif axis == "rows":
            # Weights are not cut, nor are their copies.
            found.append(replace(some, **_each(of_rows, one, some) | {"cast": one.cast}))
        else:
            found.append(replace(some, exchanged=round(some.exchanged * received), **_each(of_channels, one, some)))
    return found


def _by_tokens(analysis: Analysis, share: LayerShare, alone: Sequence[LayerCost]) -> list[LayerCost]:
    """Bytes and exchanges of the last of n ranks that divide the tokens.

    A rank has a / n + b + c n bytes: its part, keys and values that come to all tokens, and states, one from each rank.
    So n times its bytes are a polynomial of second degree in n, which three counted sizes determine.

    Raises ValueError for a size between fewer counted ones.
    """
    size = share.context
    counted = {}
    for layout in (analysis.shared["tokens"], *analysis.larger.get("tokens", ())):
        counted[layout.context] = _at(analysis, share, layout)
    if size in counted:
        return counted[size]
    if len(counted) < 3:
        known = ", ".join(map(str, counted))
        raise ValueError(f"context by tokens {size}: the costs are of {known} ranks; {ADVICE}")
    # Lagrange's factors at n, divided by n.
    factors = []
    for at in counted:
        factor = at / size
        for other in counted.keys() - {at}:
            factor *= (size - other) / (at - other)
        factors.append(factor)

    def of_tokens(*bytes_at: int) -> int:
        return max(0, round(sum(factor * each for factor, each in zip(factors, bytes_at, strict=True))))

    found = []
    for one, *at_sizes in zip(alone, *counted.values(), strict=True):
        exchanged = of_tokens(*(each.exchanged for each in at_sizes))
        # Weights are not cut, nor are their copies.
        values = _each(of_tokens, *at_sizes) | {"cast": one.cast, "exchanged": exchanged}
        found.append(replace(at_sizes[0], **values))
    return found


def resident_tensors(analysis: Analysis, tensor: int) -> tuple[tuple[ResidentTensor, ...], ...]:
    """A rank's tensors by layer at this tensor parallel size."""
    alone = analysis.alone.tensors
    if tensor == 1:
        return alone
    found = []
    for wholes, parts in zip(alone, _counted(analysis, "tensor", tensor).tensors, strict=True):
        found.append(tuple(_part(whole, part, tensor) for whole, part in zip(wholes, parts, strict=True)))
    return tuple(found)


def _part(whole: ResidentTensor, part: ResidentTensor, tensor: int) -> ResidentTensor:
    """Cuts the dimension in which the counted part is smaller."""
    shape = [one if one == some else one // tensor for one, some in zip(whole.shape, part.shape, strict=True)]
    return replace(part, shape=tuple(shape))


def _counted(analysis: Analysis, axis: CutAxis, size: int) -> LayoutBytes:
    """Layers at an axis' counted size. Raises ValueError if `size` is impossible."""
    refused = analysis.possible[axis].get(size, "was not asked for by analyze")
    if refused is not None:
        name = "tensor" if axis == "tensor" else f"context by {axis}"
        raise ValueError(f"{name} {size}: {refused}")
    return analysis.shared[axis]


def _each(of: Callable[..., int], *costs: LayerCost) -> dict[str, Any]:
    """Byte fields, each computed from the costs' same field."""
    values: dict[str, Any] = {}
    for name in BYTE_FIELDS:
        values[name] = of(*(getattr(cost, name) for cost in costs))
    working = zip(*[cost.working for cost in costs], strict=True)
    values["working"] = tuple(of(*parts) for parts in working)
    return values


def _at(analysis: Analysis, share: LayerShare, counted: LayoutBytes) -> list[LayerCost]:
    """Bytes by layer for the share's samples."""
    return [for_samples(of_sizes, share.samples, analysis.sizes) for of_sizes in zip(*counted.costs, strict=True)]
