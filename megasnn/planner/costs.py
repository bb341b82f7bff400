"""Costs of a rank's layers for one micro-batch at any size: scaled from what was measured, or computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megasnn.grid import ContextCut
from megasnn.pipeline.cost_model import LayerCost, LinkCost, for_samples
from megasnn.planner.cost_file import Analysis, Counted, CutAxis, HeldTensor, Seconds
from megasnn.planner.machines import Machine


@dataclass(frozen=True)
class Share:
    """Share of a rank in each layer and in each micro-batch.

    Attributes:
        tensor, context: ranks that share the channels, and a micro-batch; cut: by what.
        samples: of a micro-batch that the rank computes.
        ranks: that compute at the same time on its node.
    """

    tensor: int
    context: int
    cut: ContextCut
    samples: int
    ranks: int


BYTES = "held", "message", "gradient", "output", "deferred", "found", "cast"


def counted_costs(analysis: Analysis, share: Share) -> list[LayerCost]:
    """The bytes of each layer, and what ranks that share it exchange; seconds are 0.

    Where two axes share a layer, it keeps of each axis' part what the other one leaves. Raises ValueError for a size
    that cannot be.
    """
    alone = _at(analysis, share, analysis.alone)
    axes: list[tuple[CutAxis, int]] = [("tensor", share.tensor), (share.cut, share.context)]
    shared = [_shared(analysis, share, alone, axis, size) for axis, size in axes if size > 1]
    if len(shared) < 2:
        return shared[0] if shared else alone
    # Exchanges between ranks that share channels were counted for the rank's own samples, and of all rows.
    parts = share.context if share.cut == "rows" else 1
    found = []
    for whole, tensor, context in zip(alone, *shared, strict=True):
        both = _each(lambda one, some, other: -(-some * other // one) if one else some + other, whole, tensor, context)
        both["exchanged"] = tensor.exchanged // parts + context.exchanged // share.tensor
        found.append(replace(whole, collectives=tensor.collectives + context.collectives, **both))
    return found


def _shared(analysis: Analysis, share: Share, alone: Sequence[LayerCost], axis: CutAxis, size: int) -> list[LayerCost]:
    """Costs where ranks share layers along one axis alone.

    Sizes that were not counted follow from one rank and from the size that was: a share of channels takes whole +
    cut / n bytes; a share of rows cut / n, and the rows of its neighbours. Beside its samples a rank has what norms
    keep and exchange, which does not depend on the number of samples.
    """
    counted = _counted(analysis, axis, size)
    at = counted.tensor * counted.context
    received = (1 - 1 / size) / (1 - 1 / at)  # of what all ranks have, a rank receives the others' part

    def of_channels(one: int, some: int) -> int:
        cut = (one - some) / (1 - 1 / at)
        return max(0, round(one - cut + cut / size))

    def of_rows(one: int, some: int) -> int:
        return round(max(some - one / at, 0) + one / size)

    found = []
    for one, some in zip(alone, _at(analysis, share, counted), strict=True):
        if axis == "samples":
            exchanged = (size - 1) * some.exchanged
            found.append(
                replace(one, held=some.held, found=some.found, exchanged=exchanged, collectives=some.collectives)
            )
        elif axis == "rows":  # which do not cut weights
            found.append(replace(some, **_each(of_rows, one, some) | {"cast": one.cast}))
        else:
            found.append(replace(some, exchanged=round(some.exchanged * received), **_each(of_channels, one, some)))
    return found


def held_tensors(analysis: Analysis, tensor: int) -> tuple[tuple[HeldTensor, ...], ...]:
    """The tensors of each layer, as one of so many tensor-parallel ranks holds them."""
    alone = analysis.alone.tensors
    if tensor == 1:
        return alone
    some = _counted(analysis, "tensor", tensor).tensors
    return tuple(
        tuple(_part(whole, part, tensor) for whole, part in zip(wholes, parts, strict=True))
        for wholes, parts in zip(alone, some, strict=True)
    )


def _part(whole: HeldTensor, part: HeldTensor, tensor: int) -> HeldTensor:
    """Cut in the dimension in which the counted part is smaller."""
    shape = [one if one == some else one // tensor for one, some in zip(whole.shape, part.shape, strict=True)]
    return replace(part, shape=tuple(shape))


def _counted(analysis: Analysis, axis: CutAxis, size: int) -> Counted:
    """Layers of an axis at the size that was counted. Raises ValueError where another size cannot be."""
    refused = analysis.possible[axis].get(size, "was not asked for by analyze")
    if refused is not None:
        raise ValueError(f"{axis if axis == 'tensor' else f'context by {axis}'} {size}: {refused}")
    return analysis.shared[axis]


def _each(of: Callable[..., int], *costs: LayerCost) -> dict[str, Any]:
    """Fields of bytes, each of which `of` computes from those of the costs."""
    values: dict[str, Any] = {name: of(*(getattr(cost, name) for cost in costs)) for name in BYTES}
    return values | {"working": tuple(map(of, *(cost.working for cost in costs)))}


def _at(analysis: Analysis, share: Share, counted: Counted) -> list[LayerCost]:
    return [for_samples(of_sizes, share.samples, analysis.sizes) for of_sizes in zip(*counted.costs, strict=True)]


def layer_costs(analysis: Analysis, machine: Machine, share: Share, link: LinkCost) -> tuple[LayerCost, ...]:
    """With seconds. Raises ValueError for a size that cannot be.

    Args:
        link: the slower one between the ranks that share layers.
    """
    costs = counted_costs(analysis, share)
    seconds = _computed(analysis, machine, costs, share)
    if analysis.timed:
        timed = min(analysis.timed, key=lambda each: abs(each.ranks - share.ranks))
        of_timed = Share(1, 1, "samples", timed.samples, timed.ranks)
        then = _computed(analysis, machine, counted_costs(analysis, of_timed), of_timed)
        seconds = [_scaled(*each) for each in zip(timed.seconds, seconds, then, strict=True)]
    found = []
    for cost, (forward, inputs, weights) in zip(costs, seconds, strict=True):
        # Exchanges between ranks that share a layer hold up its computing; most of their bytes are gradients.
        waits = cost.collectives * link.latency + cost.exchanged * link.per_byte if cost.collectives else 0.0
        found.append(replace(cost, forward=forward, input_gradient=inputs + waits, weight_gradient=weights))
    return tuple(found)


def _computed(analysis: Analysis, machine: Machine, costs: Sequence[LayerCost], share: Share) -> list[Seconds]:
    """By the machine's rates; the first layer needs no gradient of its input."""
    found = []
    rate = machine.operations.get(analysis.precision, machine.operations["fp32"])
    for number, (layer, cost) in enumerate(zip(analysis.layers, costs, strict=True)):
        rows = share.context if share.cut == "rows" and layer.rows > 1 else 1
        product = layer.operations * share.samples / share.tensor / rows / rate
        moved = (3 * cost.held + cost.output) / machine.moved
        parts = product + moved, (product if number else 0.0) + moved, product + cost.held / machine.moved
        forward, inputs, weights = (machine.start + max(machine.least, each) for each in parts)
        found.append((forward, inputs, weights))
    return found


def _scaled(measured: Seconds, computed: Seconds, before: Seconds) -> Seconds:
    """Seconds that were measured, times the ratio of those computed for this share and for the measured one."""
    forward, inputs, weights = (
        each * (now / then if then else 1.0) for each, now, then in zip(measured, computed, before, strict=True)
    )
    return forward, inputs, weights
