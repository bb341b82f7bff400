"""Operations and energy of a sample's forward, from firing rates that a run has measured.

A multiply-add whose input is a spike is an addition, and only where the neuron fires: a synaptic operation. Joules are
those of single operations in 45 nm (M. Horowitz, ISSCC 2014), as papers on spiking networks count them: of arithmetic
alone, on hardware that skips what does not fire. A GPU's own energy is that of its watts and the time of a step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from megasnn.planner.analysis import Analysis
from megasnn.planner.plan import Plan

MULTIPLY_ADD, ADDITION = 4.6e-12, 0.9e-12  # joules, float32


@dataclass(frozen=True)
class Energy:
    """Of a sample's forward.

    Attributes:
        multiply_adds: of layers whose input is dense. synaptic: operations of the others, where neurons fire.
        dense: multiply-adds of the same network without spikes. joules, dense_joules: of both.
    """

    multiply_adds: float
    synaptic: float
    dense: float

    @property
    def joules(self) -> float:
        return self.multiply_adds * MULTIPLY_ADD + self.synaptic * ADDITION

    @property
    def dense_joules(self) -> float:
        return self.dense * MULTIPLY_ADD

    def __str__(self) -> str:
        return (
            f"a sample's forward: {self.synaptic:.4g} synaptic operations and {self.multiply_adds:.4g} multiply-adds, "
            f"{1e3 * self.joules:.4g} mJ; all of it as multiply-adds {1e3 * self.dense_joules:.4g} mJ (arithmetic in "
            f"45 nm: {1e12 * MULTIPLY_ADD:g} pJ a multiply-add, {1e12 * ADDITION:g} pJ an addition)"
        )


def energy(analysis: Analysis, rates: Mapping[str, float]) -> Energy:
    """What layers compute at these firing rates.

    A layer with several products is taken to see the mean rate of the neurons in it and of those right before it.

    Args:
        rates: spikes of a neuron and time step, by the names of neurons.
    Raises:
        ValueError: no rates of this model.
    """
    multiply_adds = synaptic = 0.0
    before: list[float] = []
    for layer in analysis.layers:
        own = [rate for name, rate in rates.items() if name == layer.name or name.startswith(f"{layer.name}.")]
        if layer.spikes and (seen := before + own):
            synaptic += layer.operations * fmean(seen)
        else:
            multiply_adds += layer.operations
        before = own[-1:] or before
    if not before:
        raise ValueError(f"there are no firing rates of {analysis.model}: {', '.join(list(rates)[:3]) or 'none'}")
    return Energy(multiply_adds, synaptic, float(sum(layer.operations for layer in analysis.layers)))


def measured_rates(path: Path) -> dict[str, float]:
    """The firing rates in the last line of a run's log.jsonl that has them. Raises ValueError where there is none."""
    found: dict[str, float] = {}
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                layers = json.loads(line).get("layers")
                if isinstance(layers, dict) and layers:
                    found = {name: float(each["firing_rate"]) for name, each in layers.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--rates {path} is no log.jsonl of a run: {error}") from None
    if not found:
        raise ValueError(f"--rates {path}: no line has firing rates; a run writes them with --log-interval")
    return found


def joules_of_step(plan: Plan) -> float:
    """Of all devices, by their watts, for as long as a step takes."""
    return plan.predicted.time.total * plan.layout.ranks * plan.cluster.machine.watts
