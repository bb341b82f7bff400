"""Costs of a rank's layers for one micro-batch at any size: measured, scaled from what was measured, or computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megasnn.grid import ContextCut
from megasnn.pipeline.cost_model import LayerCost, LinkCost, for_samples
from megasnn.planner.cost_file import Analysis, Counted, CutAxis, HeldTensor, LayerSeconds, Timed
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


WHOLE = "held", "message", "gradient", "output", "deferred", "parameters", "found", "cast"


def counted_costs(analysis: Analysis, share: Share) -> list[LayerCost]:
    """The bytes of each layer, and what ranks that share it exchange; seconds are 0.

    Sizes that were not counted follow from one rank and from the size that was: a share of channels takes whole +
    cut / n bytes; a share of rows cut / n, and the rows of its neighbours. Raises ValueError for a size that cannot be.
    """
    alone = _at(analysis, share, analysis.alone)
    costs = alone
    if share.tensor > 1:
        some = _counted(analysis, "tensor", share.tensor)
        pairs = zip(alone, _at(analysis, share, some), strict=True)
        costs = [_shrunk(*pair, some.tensor, share.tensor, False) for pair in pairs]
    if share.context == 1:
        return costs
    some = _counted(analysis, share.cut, share.context)
    shared = _at(analysis, share, some)
    if share.cut == "rows":
        by_rows = [_shrunk(*pair, some.context, share.context, True) for pair in zip(alone, shared, strict=True)]
        together = zip(costs, by_rows, alone, strict=True)
        return by_rows if share.tensor == 1 else [_of_both(*each, share) for each in together]
    # Beside its samples a rank has what norms keep and exchange, which does not depend on the number of samples.
    return [_with_norms(*each, share.context - 1, share.tensor) for each in zip(costs, shared, alone, strict=True)]


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


def _at(analysis: Analysis, share: Share, counted: Counted) -> list[LayerCost]:
    return [for_samples(of_sizes, share.samples, analysis.sizes) for of_sizes in zip(*counted.costs, strict=True)]


def _shrunk(alone: LayerCost, part: LayerCost, counted_at: int, size: int, is_rows: bool) -> LayerCost:
    def bytes_of(one: int, some: int) -> int:
        if is_rows:
            return round(max(some - one / counted_at, 0) + one / size)
        cut = (one - some) / (1 - 1 / counted_at)
        return max(0, round(one - cut + cut / size))

    received = (1 - 1 / size) / (1 - 1 / counted_at)  # of what all ranks have, a rank receives the others' part
    forward, inputs, weights = map(bytes_of, alone.working, part.working)
    counts: dict[str, Any] = {name: bytes_of(getattr(alone, name), getattr(part, name)) for name in WHOLE}
    exchanged = part.exchanged if is_rows else round(part.exchanged * received)
    return replace(part, working=(forward, inputs, weights), exchanged=exchanged, **counts)


def _with_norms(cost: LayerCost, shared: LayerCost, alone: LayerCost, others: int, tensor: int) -> LayerCost:
    """
    Args:
        shared, alone: with one other rank, and without. others: how many there are.
    """
    more = (shared.held - alone.held) // tensor
    return replace(
        cost,
        held=cost.held + more,
        found=cost.found + (shared.found - alone.found) // tensor,
        exchanged=cost.exchanged + others * shared.exchanged // tensor,
        collectives=cost.collectives + shared.collectives,
    )


def _of_both(of_tensor: LayerCost, by_rows: LayerCost, alone: LayerCost, share: Share) -> LayerCost:
    """Args: of_tensor, by_rows, alone: with channels shared, with rows shared, and with nothing shared."""

    def part(one: int, other: int, whole: int) -> int:
        return -(-one * other // whole) if whole else one

    parts: dict[str, Any] = {
        name: part(*(getattr(each, name) for each in (of_tensor, by_rows, alone))) for name in _CUT
    }
    forward, inputs, weights = map(part, of_tensor.working, by_rows.working, alone.working)
    return replace(
        of_tensor,
        working=(forward, inputs, weights),
        exchanged=of_tensor.exchanged // share.context + by_rows.exchanged // share.tensor,
        collectives=of_tensor.collectives + by_rows.collectives,
        **parts,
    )


_CUT = "held", "message", "gradient", "found", "deferred", "output"


def layer_costs(analysis: Analysis, machine: Machine, share: Share, link: LinkCost) -> tuple[LayerCost, ...]:
    """With seconds. Raises ValueError for a size that cannot be.

    Args:
        link: the slower one between the ranks that share layers.
    """
    costs = counted_costs(analysis, share)
    reference = _nearest(analysis.timed, share)
    computed = _computed(analysis, machine, costs, share)
    if reference is None:
        return tuple(
            _with_exchanges(replace(cost, **vars(each)), link, True) for cost, each in zip(costs, computed, strict=True)
        )
    of_reference = Share(reference.tensor, reference.context, reference.cut, reference.samples, reference.ranks)
    then = _computed(analysis, machine, counted_costs(analysis, of_reference), of_reference)
    shared_there = (reference.tensor, reference.context) == (share.tensor, share.context)
    found = []
    for cost, seconds, now, before in zip(costs, reference.seconds, computed, then, strict=True):
        scaled = {
            name: value * (getattr(now, name) / getattr(before, name) if getattr(before, name) else 1.0)
            for name, value in vars(seconds).items()
        }
        found.append(_with_exchanges(replace(cost, **scaled), link, not shared_there))
    return tuple(found)


def _nearest(timed: Sequence[Timed], share: Share) -> Timed | None:
    """Measurement made in the most similar way: of the same size, or of one rank's; with as many ranks at work."""

    def distance(each: Timed) -> tuple[bool, int, int]:
        is_same = (each.tensor, each.context) == (share.tensor, share.context)
        is_same &= each.context == 1 or each.cut == share.cut
        return not is_same, abs(each.ranks - share.ranks), abs(each.samples - share.samples)

    whole = [each for each in timed if each.tensor * each.context == 1]
    same = [each for each in timed if not distance(each)[0]]
    return min(same or whole, key=distance, default=None)


def _computed(analysis: Analysis, machine: Machine, costs: Sequence[LayerCost], share: Share) -> list[LayerSeconds]:
    """By the machine's rates; the first layer needs no gradient of its input."""
    found, faster = [], machine.alone if share.ranks == 1 else 1.0
    rate = machine.operations.get(analysis.precision, machine.operations["fp32"])
    for number, (layer, cost) in enumerate(zip(analysis.layers, costs, strict=True)):
        rows = share.context if share.cut == "rows" and layer.rows > 1 else 1
        product = layer.operations * share.samples / share.tensor / rows / rate
        moved = (3 * cost.held + cost.output) / machine.moved
        seconds = {
            "forward": product + moved,
            "input_gradient": (product if number else 0.0) + moved,
            "weight_gradient": product + cost.held / machine.moved,
        }
        parts = {name: (machine.start + max(machine.least, each)) / faster for name, each in seconds.items()}
        found.append(LayerSeconds(**parts))
    return found


def _with_exchanges(cost: LayerCost, link: LinkCost, adds: bool) -> LayerCost:
    """Exchanges between the ranks that share a layer hold up its computing; most of their bytes are gradients."""
    if not adds or not cost.collectives:
        return cost
    seconds = cost.collectives * link.latency + cost.exchanged * link.per_byte
    return replace(cost, input_gradient=cost.input_gradient + seconds)
