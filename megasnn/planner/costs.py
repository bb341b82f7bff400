"""What a rank's layers cost for one micro-batch at any size: measured, scaled from what was measured, or computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megasnn.grid import ContextCut
from megasnn.pipeline.costs import LayerCost, LinkCost, for_samples
from megasnn.planner.analysis import SIZES, Analysis, Counted, LayerFacts, LayerSeconds, Timed
from megasnn.planner.machines import Machine

PARTS = "forward", "input_gradient", "weight_gradient"


@dataclass(frozen=True)
class Share:
    """What a rank has of each layer and of each micro-batch.

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

    Where images are shared by rows, a rank's part of the bytes is computed from the whole, and what it needs of others
    is the row on either side of its own. Raises ValueError for a size that cannot be.
    """
    found = analysis.of(share.tensor, 1, "samples")
    if found is None or found.refused is not None:
        raise ValueError(f"tensor {share.tensor}: {found.refused if found else 'was not asked for by analyze'}")
    costs = [for_samples(pair, share.samples, SIZES) for pair in zip(found.one, found.two, strict=True)]
    if share.context == 1:
        return costs
    pair = _pair(analysis)
    if share.cut == "rows":
        costs = [_by_rows(*each, share.context) for each in zip(costs, analysis.layers, strict=True)]
    whole = analysis.of(1, 1, "samples")
    assert whole is not None, "analyze always asks for one rank"
    return [
        _with_norms(*each, share.context - 1, share.tensor) for each in zip(costs, pair.one, whole.one, strict=True)
    ]


def _with_norms(cost: LayerCost, shared: LayerCost, alone: LayerCost, others: int, tensor: int) -> LayerCost:
    """With what norms of a shared micro-batch keep and exchange, which does not depend on the number of samples.

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


def _pair(analysis: Analysis) -> Counted:
    """Two ranks that share a micro-batch by samples: what norms exchange there grows with the number of others."""
    pair = analysis.of(1, 2, "samples")
    if pair is None or pair.refused is not None:
        raise ValueError(f"context 2 by samples: {pair.refused if pair else 'was not asked for by analyze'}")
    return pair


def _by_rows(cost: LayerCost, layer: LayerFacts, ranks: int) -> LayerCost:
    if layer.rows == 1:
        return cost
    beside = 2 * (cost.message + cost.gradient) // layer.rows
    names = "held", "message", "gradient", "found", "working_again", "working_whole", "deferred", "output"
    parts = {name: -(-getattr(cost, name) // ranks) for name in names if getattr(cost, name) is not None}
    forward, inputs, weights = (-(-size // ranks) for size in cost.working)
    exchanged = cost.exchanged // ranks + beside
    return replace(cost, working=(forward, inputs, weights), exchanged=exchanged, **parts)


def work_of(layer: LayerFacts, cost: LayerCost, share: Share, first: bool) -> dict[str, Work]:
    """What the three parts of a layer compute and move; the first layer needs no gradient of its input."""
    rows = share.context if share.cut == "rows" and layer.rows > 1 else 1
    operations = layer.operations * share.samples / share.tensor / rows
    waiting = cost.waiting
    return {
        "forward": Work(operations, 3 * cost.held + waiting),
        "input_gradient": Work(0 if first else operations, 3 * cost.held + waiting),
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
    """What was measured in the most similar way: of the same size, or of one rank's; with as many ranks at work."""

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
        pack = (cost.message + cost.waiting) / machine.moved
        found.append(LayerSeconds(**parts, again=parts["forward"], pack=pack, unpack=pack))
    return found


def _with_exchanges(cost: LayerCost, share: Share, links: Links, adds: bool) -> LayerCost:
    """Exchanges between the ranks that share a layer hold up its computing; most of their bytes are gradients."""
    if not adds or not cost.collectives:
        return cost
    link = links.tensor if share.tensor > 1 else links.context
    slowest = max(link.per_byte, links.context.per_byte if share.context > 1 else 0.0)
    seconds = cost.collectives * link.latency + cost.exchanged * slowest
    return replace(cost, input_gradient=cost.input_gradient + seconds)
