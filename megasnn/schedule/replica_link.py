"""What gathers and scatters take in a simulation: a link of their own, beside the computing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megasnn.schedule.actions import USES_WEIGHTS, Action, Kind, Place


class ReplicaLinks:
    """The link of each rank to the other replicas, which carries its gathers and scatters one after another.

    Attributes:
        apart: start and end of the actions that do not start when the one before them lets the rank go on.
        coming: when the weights of a chunk are there, until they are used.
    """

    def __init__(self, ranks: int, times: Mapping[Kind, Sequence[float]]) -> None:
        """Args: times: what a gather or scatter of each chunk takes."""
        self.apart: dict[Place, tuple[float, float]] = {}
        self.coming: dict[int, float] = {}
        self._free_at, self._times = [0.0] * ranks, times

    def carry(self, place: Place, action: Action, now: float) -> None:
        _, end = self.apart[place] = self.queue(place[0], now, self._times[action.kind][action.chunk])
        if action.kind is Kind.GATHER_WEIGHTS:
            self.coming[action.chunk] = end

    def queue(self, rank: int, now: float, seconds: float) -> tuple[float, float]:
        """When something that takes so long on a rank's link begins and ends, behind what is there already."""
        start = max(now, self._free_at[rank])
        self._free_at[rank] = start + seconds
        return start, start + seconds

    def use(self, place: Place, action: Action, now: float, time: float) -> float:
        """When a computation is over that takes so long and could start now."""
        ready = self.coming.pop(action.chunk, now) if action.kind in USES_WEIGHTS else now
        if ready > now:
            self.apart[place] = ready, ready + time
        return max(now, ready) + time
