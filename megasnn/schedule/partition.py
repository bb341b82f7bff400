"""Partition of a model's layers into pipeline chunks: balanced by cost, or by an explicit layout.

A model is a flat list of fine-grained layers, grouped in layer groups (Spikformer: the patch stem, each block, the
head). A chunk is a contiguous range of layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby

from megasnn.common.registry import Registry

LAYOUT_FLAG = "--pipeline-model-parallel-layout"
FILL_AND_DRAIN = 1 / 8  # of a chunk's cost beside a rank's: about that of a step of eight micro-batches


def balanced_bounds(costs: Sequence[float], parts: int) -> list[range]:
    """Contiguous partition whose most costly part costs least; exact.

    Among those, the one with the smallest sum of squares, so that the other parts are balanced too. Dynamic
    programming: the best of the first n layers in p parts follows from that in p - 1 parts.

    Args:
        costs: of each layer, in any unit.
        parts: number of chunks.
    Raises:
        ValueError: parts below 1, a cost that is negative or not finite, more parts than layers.
    """
    if parts < 1:
        raise ValueError(f"cannot cut {len(costs)} layers into {parts} parts; --pipeline-model-parallel-size")
    if bad := [cost for cost in costs if not (math.isfinite(cost) and cost >= 0)]:
        raise ValueError(f"costs must be finite and not negative, got {bad[0]}")
    if parts > len(costs):
        raise ValueError(
            f"{parts} pipeline chunks for {len(costs)} layers leave chunks without a layer; lower "
            f"--pipeline-model-parallel-size or --num-virtual-stages-per-pipeline-rank"
        )
    total, layers = list(accumulate(costs, initial=0.0)), len(costs)

    def cuts(limit: float) -> tuple[float, list[int]]:
        """Largest part, or with a limit for it the sum of squares, and the ends of the parts."""
        none: tuple[float, list[int]] = (math.inf, [])
        best = [(0.0, none[1]), *[none] * layers]
        for part in range(parts):
            following = [none] * (layers + 1)
            for end in range(part + 1, layers + 1):
                for start in range(part, end):
                    before, span = best[start][0], total[end] - total[start]
                    squares = before + (span * span if span <= limit else math.inf)
                    value = max(before, span) if limit == math.inf else squares
                    if value < following[end][0]:
                        following[end] = value, [*best[start][1], end]
            best = following
        return best[layers]

    largest, _ = cuts(math.inf)
    return _ranges(cuts(largest)[1])


def placed_bounds(costs: Sequence[float], placement: Sequence[int]) -> list[range]:
    """Contiguous partition into a chunk for each entry of `placement`, none empty, that balances the ranks.

    What counts is the most that a rank computes for a micro-batch, and with less weight the most costly chunk, since
    filling and draining the pipeline takes that once a step. With one chunk a rank it is `balanced_bounds`. Otherwise
    the balanced cuts are moved as long as that helps.

    Raises ValueError as `balanced_bounds` does.
    """
    bounds = balanced_bounds(costs, len(placement))
    if len(set(placement)) == len(placement):
        return bounds
    total = list(accumulate(costs, initial=0.0))

    def badness(cuts: Sequence[int]) -> float:
        loads, most, before = [0.0] * (max(placement) + 1), 0.0, 0.0
        for rank, cut in zip(placement, (*cuts, len(costs)), strict=True):
            span, before = total[cut] - before, total[cut]
            loads[rank] += span
            most = max(most, span)
        return max(loads) + FILL_AND_DRAIN * most

    best = _moved_while_better(tuple(span.stop for span in bounds[:-1]), len(costs), badness)
    return _ranges([*best, len(costs)])


def _moved_while_better(
    cuts: tuple[int, ...], layers: int, badness: Callable[[Sequence[int]], float]
) -> tuple[int, ...]:
    """Moves one or two cuts at a time by one layer."""
    steps = [((a, x), (b, y)) for a in range(len(cuts)) for b in range(a, len(cuts)) for x in (-1, 1) for y in (-1, 1)]
    least = badness(cuts)
    while True:
        found = []
        for step in steps:
            moved = list(cuts)
            for at, by in dict(step).items():
                moved[at] += by
            if all(a < b for a, b in zip([0, *moved], [*moved, layers], strict=True)):
                found.append((badness(moved), tuple(moved)))
        if not found or min(found)[0] >= least:
            return cuts
        least, cuts = min(found)


def loop_placement(ranks: int, chunks_per_rank: int = 1) -> tuple[int, ...]:
    """Rank of each chunk, going round: rank r holds chunks r, ranks + r, 2 ranks + r, ..."""
    return tuple(range(ranks)) * chunks_per_rank


def v_placement(ranks: int, chunks_per_rank: int = 2) -> tuple[int, ...]:
    """Rank of each chunk, down and up again: rank r holds chunks r and 2 ranks - 1 - r.

    The first and the last chunk then share a rank, and so do the two at the turn. Raises ValueError for another number
    of chunks on each rank than two.
    """
    if chunks_per_rank != 2:
        raise ValueError(f"a v places two chunks on each rank, not {chunks_per_rank}")
    return (*range(ranks), *reversed(range(ranks)))


# Name -> (ranks, chunks on each rank) -> the rank of each chunk.
PLACEMENTS: Registry[Callable[[int, int], tuple[int, ...]]] = Registry(
    "--placement", {"loop": loop_placement, "v": v_placement}
)


def parse_layout(layout: str) -> tuple[int, ...]:
    """Number of layer groups or layers in each chunk: "1|2|2|1" or "1,2,2,1". Zeros are legal.

    Raises ValueError for anything that is not a whole number, negative ones, and a layout without a layer.
    """
    try:
        sizes = tuple(int(text) for text in layout.replace(",", "|").split("|"))
    except ValueError:
        raise ValueError(f'{LAYOUT_FLAG} "{layout}" is no list of whole numbers; it looks like "1|2|2|1"') from None
    if any(size < 0 for size in sizes):
        raise ValueError(f"{LAYOUT_FLAG} {layout_text(sizes)}: {min(sizes)} is negative")
    if not any(sizes):
        raise ValueError(f"{LAYOUT_FLAG} {layout_text(sizes)} holds no layer")
    return sizes


def layout_text(layout: Sequence[int]) -> str:
    """Notation of the flag: ``"1|2|2|1"``, quotes included."""
    return '"' + "|".join(str(size) for size in layout) + '"'


def layout_to_bounds(layout: Sequence[int], group_of_layer: Sequence[str], chunks: int | None = None) -> list[range]:
    """Layers of each chunk of an explicit layout, which counts either layer groups or single layers.

    Args:
        layout: sizes of the chunks.
        group_of_layer: the layer group of each layer of the model; layers of a group are neighbours.
        chunks: expected length of the layout, where known.
    Raises:
        ValueError: another length, or a sum that is neither the number of layer groups nor that of layers.
    """
    if chunks is not None and len(layout) != chunks:
        raise ValueError(
            f"{LAYOUT_FLAG} {layout_text(layout)} has {len(layout)} entries for {chunks} chunks "
            f"(--pipeline-model-parallel-size x --num-virtual-stages-per-pipeline-rank)"
        )
    group_sizes = [len(list(layers)) for _, layers in groupby(group_of_layer)]
    if sum(layout) == len(group_sizes):
        layers_before_group = list(accumulate(group_sizes, initial=0))
        return _ranges([layers_before_group[groups] for groups in accumulate(layout)])
    if sum(layout) == len(group_of_layer):
        return _ranges(list(accumulate(layout)))
    raise ValueError(
        f"{LAYOUT_FLAG} {layout_text(layout)} sums to {sum(layout)}; the model has {len(group_sizes)} layer groups "
        f"({', '.join(group for group, _ in groupby(group_of_layer))}) of together {len(group_of_layer)} "
        f"layers, and a layout must sum to one of the two"
    )


def _ranges(ends: Sequence[int]) -> list[range]:
    return [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
