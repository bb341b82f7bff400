"""A choice of all combinations, in which any two values occur together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, TypeVar

Case = TypeVar("Case", bound=tuple[Any, ...])
Pair = tuple[object, ...]


def pairs_of(case: tuple[Any, ...]) -> set[Pair]:
    """Any two values of a case, each with the place where it stands."""
    return set(combinations(enumerate(case), 2))


def pairwise(cases: Sequence[Case], pairs_of: Callable[[Case], set[Pair]] = pairs_of) -> list[Case]:
    """Some of the cases, with any two values that are together in one of them; always the one with most new pairs."""
    missing, chosen = set().union(*map(pairs_of, cases)), list[Case]()
    while missing:
        chosen.append(max(cases, key=lambda case: len(pairs_of(case) & missing)))
        missing -= pairs_of(chosen[-1])
    return chosen
