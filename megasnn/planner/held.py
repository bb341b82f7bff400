"""What ranks hold when backwards begin: the order of forwards and backwards says it, before any costs are known."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cache

from megasnn.schedule.actions import Action, Kind, Schedule
from megasnn.schedule.named import RECIPES, SCHEDULES

Held = tuple[int, tuple[int, ...]]
"""The chunk that goes backward, and how many micro-batches each chunk of its rank holds then."""


@cache
def held_before_backwards(name: str, stages: int, micro_batches: int, chunks: int) -> tuple[int, ...]:
    """How many micro-batches each chunk holds at least when the first backward of its rank begins, which is one through
    the last chunk of the rank. Args: as of `held_at_backwards`.
    """
    found = [micro_batches] * (stages * chunks)
    placement = SCHEDULES[name].placement(stages, chunks)
    for of_ranks in held_at_backwards(name, stages, micro_batches, chunks):
        of_chunks = [iter(held) for (_, held), *_ in of_ranks]
        for chunk, rank in enumerate(placement):
            found[chunk] = min(found[chunk], next(of_chunks[rank]))
    return tuple(found)


def held_at_backwards(
    name: str, stages: int, micro_batches: int, chunks: int
) -> tuple[tuple[tuple[Held, ...], ...], ...]:
    """In each order that a named schedule may take, of each rank, what it holds at least when a backward begins: each
    case once, that of the first backward first.

    It may be more, where weight gradients have to wait for their turn.

    Args:
        chunks: on each rank.
    """
    if name == "gpipe":
        return (tuple(((rank, (micro_batches,)),) for rank in range(stages)),)
    # Further micro-batches begin where those before them go backward: a rank holds no more of them.
    return _of_orders(name, stages, min(micro_batches, 2 * stages), chunks)


@cache
def _of_orders(name: str, stages: int, micro_batches: int, chunks: int) -> tuple[tuple[tuple[Held, ...], ...], ...]:
    placement = SCHEDULES[name].placement(stages, chunks)
    of_ranks = [[chunk for chunk, place in enumerate(placement) if place == rank] for rank in range(stages)]
    orders = _orders(name, stages, micro_batches, chunks)
    found = (tuple(_held(row, mine) for row, mine in zip(each.actions, of_ranks, strict=True)) for each in orders)
    return tuple(dict.fromkeys(found))


def _orders(name: str, stages: int, micro_batches: int, chunks: int) -> Iterator[Schedule]:
    """Forwards and first parts of backwards of each rank."""
    of_named = SCHEDULES[name].order
    if of_named is None:
        yield from RECIPES[name](stages).orders(micro_batches)
    else:
        yield of_named(stages, micro_batches, chunks)


def _held(row: Sequence[Action], mine: Sequence[int]) -> tuple[Held, ...]:
    """Each case once. Args: mine: the chunks of the rank."""
    counts = dict.fromkeys(mine, 0)
    found = dict[Held, None]()
    for chunk, kind, _ in row:
        if kind is Kind.FORWARD:
            counts[chunk] += 1
            continue
        found[chunk, tuple(counts.values())] = None
        counts[chunk] -= 1
    return tuple(found)


def identity_of(name: str, stages: int, micro_batches: int) -> Hashable:
    """Equal for named schedules that are the same schedule, whatever the costs: few stages, or few micro-batches, leave
    some of them no choice."""
    if name not in RECIPES:
        return name
    recipe = RECIPES[name](stages)
    ahead = tuple(min(recipe.pace * behind, micro_batches) for behind in range(stages))
    return recipe.v, min(recipe.limit, micro_batches), ahead
