"""Partition of layers into pipeline chunks: balanced by cost, or by an explicit layout.

Layers are a flat list, in layer groups (Spikformer: patch stem, each block, head). A chunk is a contiguous range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, combinations_with_replacement, groupby, pairwise, product

from megasnn.common.files import quantity
from megasnn.common.registry import Registry

LAYOUT_FLAG = "--pipeline-model-parallel-layout"
# Weight of the most costly chunk beside the most costly rank. Filling and draining takes that chunk's time once a step,
# the rank's time recurs with every micro-batch: the ratio in a step of eight micro-batches.
FILL_AND_DRAIN = 1 / 8


def balanced_bounds(costs: Sequence[float], parts: int) -> list[range]:
    """Contiguous partition with the smallest maximum cost; exact.

    Ties go to the smallest sum of squares, which balances the other parts too. Raises ValueError for parts below 1, a
    negative or infinite cost, or more parts than layers.
    """
    if parts < 1:
        raise ValueError(f"cannot cut {len(costs)} layers into {parts} parts; --pipeline-model-parallel-size")
    for cost in costs:
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(f"costs must be finite and not negative, got {cost}")
    if parts > len(costs):
        raise ValueError(
            f"{parts} pipeline chunks for {quantity(len(costs), 'layer')} leave chunks without a layer; lower "
            f"--pipeline-model-parallel-size or --num-virtual-stages-per-pipeline-rank"
        )
    largest, _ = _best_ends(costs, parts, max)

    def add_square(before: float, span: float) -> float:
        return before + span * span if span <= largest else math.inf

    _, ends = _best_ends(costs, parts, add_square)
    return _ranges(ends)


def _best_ends(costs: Sequence[float], parts: int, add: Callable[[float, float], float]) -> tuple[float, list[int]]:
    """Smallest partition value, and where its parts end.

    Args:
        add: (value so far, next part's cost) -> value with that part.
    """
    # Dynamic programming over the parts: the best partition of the first layers into p parts extends one into p - 1.
    layers = len(costs)
    total = list(accumulate(costs, initial=0.0))
    none: tuple[float, list[int]] = (math.inf, [])
    best = [none] * (layers + 1)  # by number of layers
    best[0] = (0.0, [])
    for part in range(parts):
        extended = [none] * (layers + 1)
        for end in range(part + 1, layers + 1):
            for start in range(part, end):
                before, ends = best[start]
                value = add(before, total[end] - total[start])
                if value < extended[end][0]:
                    extended[end] = value, [*ends, end]
        best = extended
    return best[layers]


def placed_bounds(costs: Sequence[float], placement: Sequence[int]) -> list[range]:
    """Contiguous partition into one chunk per entry of `placement`, none empty, with balanced ranks.

    Minimizes the largest rank cost, and with less weight the largest chunk cost, by local searches from several starts.
    Raises ValueError as `balanced_bounds` does.
    """
    bounds = balanced_bounds(costs, len(placement))
    if len(set(placement)) == len(placement):
        return bounds
    layers = len(costs)
    total = list(accumulate(costs, initial=0.0))

    def badness(cuts: Sequence[int]) -> float:
        loads = [0.0] * (max(placement) + 1)
        largest = 0.0
        before = 0.0
        for rank, cut in zip(placement, (*cuts, layers), strict=True):
            span = total[cut] - before
            before = total[cut]
            loads[rank] += span
            largest = max(largest, span)
        return max(loads) + FILL_AND_DRAIN * largest

    # Unequal chunks often balance the ranks better, and a search from equal ones alone ends in a local minimum. In a V,
    # later cuts give the first rank's first chunk about as much as they take from its last one.
    reach = layers // len(placement)
    found = []
    for shift in range(-reach, reach + 1):
        start = tuple(span.stop + shift for span in bounds[:-1])
        if start[0] > 0 and start[-1] < layers:
            cuts = _moved_while_better(start, layers, badness)
            found.append((badness(cuts), cuts))
    _, best = min(found)
    return _ranges([*best, layers])


def _moved_while_better(
    cuts: tuple[int, ...], layers: int, badness: Callable[[Sequence[int]], float]
) -> tuple[int, ...]:
    moves = []
    for first, second in combinations_with_replacement(range(len(cuts)), 2):
        for step, other_step in product((-1, 1), repeat=2):
            # One cut, if both are the same.
            moves.append({first: step, second: other_step})
    least = badness(cuts)
    while True:
        found = []
        for move in moves:
            moved = list(cuts)
            for cut, step in move.items():
                moved[cut] += step
            if all(start < end for start, end in pairwise([0, *moved, layers])):
                found.append((badness(moved), tuple(moved)))
        if not found or min(found)[0] >= least:
            return cuts
        least, cuts = min(found)


def loop_placement(ranks: int, chunks_per_rank: int = 1) -> tuple[int, ...]:
    """Each chunk's rank in a loop: rank r holds chunks r, ranks + r, 2 ranks + r, ..."""
    return tuple(range(ranks)) * chunks_per_rank


def v_placement(ranks: int, chunks_per_rank: int = 2) -> tuple[int, ...]:
    """Each chunk's rank in a V: rank r holds chunks r and 2 ranks - 1 - r.

    Raises ValueError unless there are two chunks per rank.
    """
    if chunks_per_rank != 2:
        raise ValueError(f"a v places two chunks on each rank, not {chunks_per_rank}")
    return (*range(ranks), *reversed(range(ranks)))


PLACEMENTS: Registry[Callable[[int, int], tuple[int, ...]]] = Registry(
    "--placement", {"loop": loop_placement, "v": v_placement}
)
"""By name: (ranks, chunks per rank) -> rank of each chunk."""


def parse_layout(layout: str) -> tuple[int, ...]:
    """Layer groups or layers per chunk: "1|2|2|1" or "1,2,2,1". Zeros are allowed.

    Raises ValueError for an entry that is no whole number or negative, and for a layout without layers.
    """
    entries = layout.replace(",", "|").split("|")
    try:
        sizes = tuple(int(entry) for entry in entries)
    except ValueError:
        raise ValueError(f'{LAYOUT_FLAG} "{layout}" is no list of whole numbers; it looks like "1|2|2|1"') from None
    if min(sizes) < 0:
        raise ValueError(f"{LAYOUT_FLAG} {layout_text(sizes)}: {min(sizes)} is negative")
    if not any(sizes):
        raise ValueError(f"{LAYOUT_FLAG} {layout_text(sizes)} holds no layer")
    return sizes


def layout_text(layout: Sequence[int]) -> str:
    """The flag's notation: ``"1|2|2|1"``, quotes included."""
    return '"' + "|".join(str(size) for size in layout) + '"'


def layout_to_bounds(layout: Sequence[int], group_of_layer: Sequence[str], chunks: int | None = None) -> list[range]:
    """Each chunk's layers in an explicit layout, which counts layer groups or single layers.

    Args:
        group_of_layer: each layer's group; a group's layers are adjacent.
        chunks: expected number of entries, if known.
    Raises:
        ValueError: another number of entries, or a sum that fits neither layer groups nor layers.
    """
    if chunks is not None and len(layout) != chunks:
        raise ValueError(
            f"{LAYOUT_FLAG} {layout_text(layout)} has {quantity(len(layout), 'entry')} for "
            f"{quantity(chunks, 'chunk')} (--pipeline-model-parallel-size x --num-virtual-stages-per-pipeline-rank)"
        )
    groups = []
    group_sizes = []
    for group, layers in groupby(group_of_layer):
        groups.append(group)
        group_sizes.append(len(list(layers)))
    if sum(layout) == len(groups):
        layers_before_group = list(accumulate(group_sizes, initial=0))
        return _ranges([layers_before_group[end] for end in accumulate(layout)])
    if sum(layout) == len(group_of_layer):
        return _ranges(list(accumulate(layout)))
    raise ValueError(
        f"{LAYOUT_FLAG} {layout_text(layout)} sums to {sum(layout)}; the model has {len(groups)} layer groups "
        f"({', '.join(groups)}) of together {len(group_of_layer)} "
        f"layers, and a layout must sum to one of the two"
    )


def _ranges(ends: Sequence[int]) -> list[range]:
    return [range(start, end) for start, end in pairwise([0, *ends])]
