"""What the planner foresees of a step on a layout."""

from __future__ import annotations

from dataclasses import dataclass

from megasnn.planner.memory import MemoryForecast
from megasnn.schedule import Schedule, Simulation


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        pipeline: forwards and backwards, with all that holds them up.
        reduction: what is left of gradients' sums behind them.
        agreement: all ranks wait for each other with loss and norm. update: the optimizer. sharing: rows that owners
            then give to the others.
    """

    pipeline: float
    reduction: float
    agreement: float
    update: float
    sharing: float

    @property
    def total(self) -> float:
        return self.pipeline + self.reduction + self.agreement + self.update + self.sharing


@dataclass(frozen=True)
class Predicted:
    """
    Attributes:
        memory: of each pipeline rank. bounds: the layers of each chunk.
        idle: share of the ranks' time in which they do not compute, in the pipeline.
    """

    time: StepTime
    memory: tuple[MemoryForecast, ...]
    bounds: tuple[range, ...]
    idle: float
    schedule: Schedule
    simulation: Simulation
