"""Synaptic operations and energy of a sample's forward, from firing rates that a run has measured.

Names are NeuroBench's (J. Yik et al., arXiv 2304.04640): a multiply-add whose input is a spike is an accumulate, and
effective only where the neuron fires. Joules are those of single operations in 45 nm (M. Horowitz, ISSCC 2014): of
arithmetic alone, on hardware that skips what does not fire.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from megasnn.planner.cost_file import Analysis

MULTIPLY_ADD, ADDITION = 4.6e-12, 0.9e-12  # joules, float32


@dataclass(frozen=True)
class SynapticOperations:
    """Operations of a sample's forward.

    Attributes:
        effective_macs: multiply-adds of layers whose input is dense. effective_acs: additions of the others, where
            neurons fire. dense: multiply-adds of the same network without spikes.
    """

    effective_macs: float
    effective_acs: float
    dense: float

    @property
    def joules(self) -> float:
        return self.effective_macs * MULTIPLY_ADD + self.effective_acs * ADDITION

    def __str__(self) -> str:
        return (
            f"synaptic operations of a sample: Effective_MACs {self.effective_macs:.4g}, Effective_ACs "
            f"{self.effective_acs:.4g}, Dense {self.dense:.4g}; {1e3 * self.joules:.4g} mJ, all of it as multiply-adds "
            f"{1e3 * self.dense * MULTIPLY_ADD:.4g} mJ (arithmetic in 45 nm: {1e12 * MULTIPLY_ADD:g} and "
            f"{1e12 * ADDITION:g} pJ each)"
        )


def synaptic_operations(analysis: Analysis, rates: Mapping[str, float]) -> SynapticOperations:
    """What layers compute at these firing rates.

    A layer with several products is taken to see the mean rate of the neurons in it and of those right before it.

    Args:
        rates: spikes of a neuron and time step, by the names of neurons.
    Raises:
        ValueError: no rates of this model.
    """
    macs = acs = 0.0
    before: list[float] = []
    for layer in analysis.layers:
        own = [rate for name, rate in rates.items() if name == layer.name or name.startswith(f"{layer.name}.")]
        if layer.spikes and (seen := before + own):
            acs += layer.operations * fmean(seen)
        else:
            macs += layer.operations
        before = own[-1:] or before
    if not before:
        raise ValueError(f"there are no firing rates of {analysis.model}: {', '.join(list(rates)[:3]) or 'none'}")
    return SynapticOperations(macs, acs, float(sum(layer.operations for layer in analysis.layers)))


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
