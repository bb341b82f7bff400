"""Synaptic operations of a sample by measured firing rates, and the energy that they are estimated to take.

Names are NeuroBench's (Yik et al. 2025, arXiv 2304.04640): a multiply-add whose input is dense is an effective MAC, one
whose input is a spike an addition, an effective AC, and only where the neuron fires. Energies are those of single
float32 operations in 45 nm (Horowitz, ISSCC 2014): arithmetic alone, on hardware that skips silent neurons.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from megasnn.telemetry.spikes import LayerSpikes

MAC_JOULES, AC_JOULES = 4.6e-12, 0.9e-12


class LayerWork(NamedTuple):
    """A layer's name, multiply-adds in a sample's forward, and whether its input holds spikes or sums of them."""

    name: str
    multiply_adds: int
    takes_spikes: bool


def synaptic_operations(layers: Iterable[LayerWork], spikes: Sequence[LayerSpikes]) -> dict[str, float]:
    """Operations of a sample and millijoules, by scalar name; empty without firing rates.

    A layer with several products sees the mean rate of the neurons in it and of those right before it.

    Args:
        layers, spikes: in the model's order; neurons are named after their layers.
    """
    if not spikes:
        return {}
    macs = acs = 0.0
    before: list[float] = []
    for layer in layers:
        own = [each.firing_rate for each in spikes if f"{each.name}.".startswith(f"{layer.name}.")]
        if layer.takes_spikes and (seen := before + own):
            acs += layer.multiply_adds * fmean(seen)
        else:
            macs += layer.multiply_adds
        before = own[-1:] or before
    return {
        "validation/effective_macs": macs,
        "validation/effective_acs": acs,
        "validation/energy_mj": 1e3 * (macs * MAC_JOULES + acs * AC_JOULES),
    }


def describe_operations(layers: Iterable[LayerWork], scalars: dict[str, float]) -> str:
    """Line of the log for `synaptic_operations`, beside what would be computed without spikes."""
    value = {name.rpartition("/")[2]: each for name, each in scalars.items()}
    dense = sum(layer.multiply_adds for layer in layers)
    return (
        f"a sample's forward: {value['effective_acs']:.4g} effective ACs and {value['effective_macs']:.4g} effective "
        f"MACs, {value['energy_mj']:.4g} mJ in 45 nm; dense: {dense:.4g} MACs, {1e3 * dense * MAC_JOULES:.4g} mJ"
    )
