"""Candidates for a plan, and which of those that were simulated is taken."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megasnn.planner.layout import Layout

Prefer = Literal["speed", "memory", "capacity"]
AS_FAST = 1.01  # times as long as the fastest is as fast, as far as the planner can tell


@dataclass(frozen=True)
class Candidate:
    """A layout that was looked at.

    Attributes:
        seconds, bytes: of a step, and that the largest rank needs; by closed bounds, or simulated. None: it cannot be.
        reason: why it was not taken; "" of the one that was.
    """

    layout: Layout
    seconds: float | None
    bytes: float | None
    simulated: bool
    reason: str


class Choice:
    """What is taken of the candidates that were simulated: of those that are preferred, and no more than 1 % slower
    than the fastest of these, the simplest.

    Attributes:
        taken: None before there is a candidate.
    """

    def __init__(self, preferred: Callable[[Candidate], float]) -> None:
        """Args: preferred: of a candidate, what is wanted to be least, before its time decides; of bounds, a bound."""
        self._preferred = preferred
        self._least = math.inf
        self._alike: list[Candidate] = []  # those that have the least
        self.taken: Candidate | None = None
        self.slowest = math.inf  # seconds of one device, where that fits: no plan is slower

    def add(self, each: Candidate) -> None:
        mine = self._preferred(each)
        if mine > self._least or _seconds(each) > AS_FAST * self.slowest:
            return
        self._alike = [*(self._alike if mine == self._least else ()), each]
        self._least = mine
        longest = AS_FAST * self._fastest()
        self.taken = min((one for one in self._alike if _seconds(one) <= longest), key=_simplicity)

    def may_change_by(self, each: Candidate) -> bool:
        """Whether another one may be taken when this one is simulated, which shows no less than its bounds."""
        if _seconds(each) > AS_FAST * self.slowest:
            return False
        mine = self._preferred(each)
        if self.taken is None or mine != self._least:
            return mine < self._least
        may_be_taken = _seconds(each) <= AS_FAST * self._fastest() and _simplicity(each) < _simplicity(self.taken)
        return may_be_taken or AS_FAST * _seconds(each) < _seconds(self.taken)

    def _fastest(self) -> float:
        return min(map(_seconds, self._alike))


def _seconds(each: Candidate) -> float:
    return math.inf if each.seconds is None else each.seconds


def _simplicity(each: Candidate) -> tuple[float, ...]:
    return each.layout.parts, _seconds(each), each.bytes or 0.0
