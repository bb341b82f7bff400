"""Shares of a device's peak rates with which measured steps come out best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from megasnn.config import PretrainConfig
from megasnn.planner.analysis import Analysis
from megasnn.planner.cluster import Cluster
from megasnn.planner.layout import Layout
from megasnn.planner.machines import DEVICES, REACHED, Reached
from megasnn.planner.step import Predictor

DEVICE = "cpu-core"
FITTED = "operations", "moved", "links", "start", "alone"


@dataclass(frozen=True)
class Example:
    """A layout of a model that was measured, and the seconds of its step."""

    known: Analysis
    config: PretrainConfig
    layout: Layout
    seconds: float


def foreseen(example: Example, reached: Reached) -> float:
    """Seconds of a step by the table of devices, with these shares."""
    device = DEVICES[DEVICE]
    machine = device.machine(DEVICE, example.config.training.precision, reached)
    cluster = Cluster(example.layout.ranks, example.layout.ranks, machine)
    return Predictor(example.known, example.config, cluster).predict(example.layout).time.total


def fitted(examples: Sequence[Example]) -> Reached:
    """The shares with the smallest squares of relative errors."""
    start = REACHED[DEVICES[DEVICE].kind]

    def with_values(logarithms: NDArray[np.float64]) -> Reached:
        return replace(start, **dict(zip(FITTED, np.exp(logarithms).tolist(), strict=True)))

    def errors(logarithms: NDArray[np.float64]) -> list[float]:
        reached = with_values(logarithms)
        return [float(np.log(foreseen(each, reached) / each.seconds)) for each in examples]

    begin = np.log([getattr(start, name) for name in FITTED])
    return with_values(least_squares(errors, begin, diff_step=0.01).x)
