"""Costs of a rank's layers for one micro-batch at any size: measured, scaled from what was measured, or computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megasnn.grid import ContextCut
from megasnn.pipeline.cost_model import LayerCost, LinkCost, for_samples
from megasnn.planner.cost_file import Analysis, LayerFacts, LayerSeconds, Timed
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


class Work(NamedTuple):
    """Multiply-adds, and bytes that all else moves."""

    operations: float
    moved: float


def counted_costs(analysis: Analysis, share: Share) -> list[LayerCost]:
    """The bytes of each layer, and what ranks that share it exchange; seconds are 0.

    Where channels and rows are shared at once, both were counted by themselves. Raises ValueError for a size that
    cannot be.
    """
    costs = _at(analysis, share, share.tensor, 1)
    if share.context == 1:
        return costs
    alone = _at(analysis, share, 1, 1)
    if share.cut == "rows":
        by_rows = _at(analysis, share, 1, share.context, "rows")
        together = zip(costs, by_rows, alone, strict=True)
        return by_rows if share.tensor == 1 else [_of_both(*each, share) for each in together]
    # Beside its samples a rank has what norms keep and exchange, which does not depend on the number of samples.
    pairs = zip(costs, _at(analysis, share, 1, 2), alone, strict=True)
    return [_with_norms(*each, share.context - 1, share.tensor) for each in pairs]


def _at(analysis: Analysis, share: Share, tensor: int, context: int, cut: ContextCut = "samples") -> list[LayerCost]:
    found = analysis.of(tensor, context, cut)
    if found is None or found.refused is not None:
        what = f"tensor {tensor}" if context == 1 else f"context {context} by {cut}"
        raise ValueError(f"{what}: {found.refused if found else 'was not asked for by analyze'}")
    return [for_samples(of_sizes, share.samples, analysis.sizes) for of_sizes in zip(*found.costs, strict=True)]


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


def work_of(layer: LayerFacts, cost: LayerCost, share: Share, first: bool) -> dict[str, Work]:
    """Work that the three parts of a layer compute and move; the first layer needs no gradient of its input."""
    rows = share.context if share.cut == "rows" and layer.rows > 1 else 1
    operations = layer.operations * share.samples / share.tensor / rows
    return {
        "forward": Work(operations, 3 * cost.held + cost.output),
        "input_gradient": Work(0 if first else operations, 3 * cost.held + cost.output),
        "weight_gradient": Work(operations, cost.held),
    }


def layer_costs(analysis: Analysis, machine: Machine, share: Share, links: Links) -> tuple[LayerCost, ...]:
    """With seconds. Raises ValueError for a size that cannot be."""
    costs = counted_costs(analysis, share)
    reference = _nearest(analysis.timed, share)
    computed = _computed(analysis, machine, costs, share)
    if reference is None:
        return tuple(
            _with_exchanges(replace(cost, **vars(each)), share, links, True)
            for cost, each in zip(costs, computed, strict=True)
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
        found.append(_with_exchanges(replace(cost, **scaled), share, links, not shared_there))
    return tuple(found)


@dataclass(frozen=True)
class Links:
    """Between the ranks of each group."""

    tensor: LinkCost
    context: LinkCost


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
    """By the machine's rates."""
    found, faster = [], machine.alone if share.ranks == 1 else 1.0
    for number, (layer, cost) in enumerate(zip(analysis.layers, costs, strict=True)):
        parts = {}
        for name, work in work_of(layer, cost, share, number == 0).items():
            seconds = work.operations / machine.operations + work.moved / machine.moved
            parts[name] = (machine.start + max(machine.least, seconds)) / faster
        found.append(LayerSeconds(**parts))
    return found


def _with_exchanges(cost: LayerCost, share: Share, links: Links, adds: bool) -> LayerCost:
    """Exchanges between the ranks that share a layer hold up its computing; most of their bytes are gradients."""
    if not adds or not cost.collectives:
        return cost
    link = links.tensor if share.tensor > 1 else links.context
    slowest = max(link.per_byte, links.context.per_byte if share.context > 1 else 0.0)
    seconds = cost.collectives * link.latency + cost.exchanged * slowest
    return replace(cost, input_gradient=cost.input_gradient + seconds)
