"""Spikes of each layer: firing rate, shares of silent and saturated neurons, and rasters of a few neurons.

A neuron is silent only if no presentation makes it fire. So the spikes of ranks that hold the same neurons (replicas,
and ranks that share micro-batches by samples) are added up neuron by neuron; then the neurons of ranks that hold others
(tensor parallel ones, and those that share images by rows) are counted.

Synaptic operations of a sample follow from measured firing rates, and their energy is estimated. Names are NeuroBench's
(Yik et al. 2025, arXiv 2304.04640): a multiply-add whose input is dense is an effective MAC, one whose input is a spike
an addition, an effective AC, and only where the neuron fires. Energies are those of single float32 operations in 45 nm
(Horowitz, ISSCC 2014): arithmetic alone, on hardware that skips silent neurons.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

RASTER_NEURONS, RASTER_SAMPLES = 32, 4

Raster = NDArray[np.bool_]
"""[samples, neurons, T]: which neurons fired when."""
MAC_JOULES, AC_JOULES = 4.6e-12, 0.9e-12


@dataclass(frozen=True)
class LayerSpikes:
    """Statistics of a layer; a neuron is one channel at one place.

    Attributes:
        firing_rate: spikes per neuron and time step; above 1 where neurons fire counts. silent: share of neurons that
            never fired.
        saturated: share of neurons that fired a spike a step, or more in the mean: of 0 and 1, at every step.
    """

    name: str
    firing_rate: float
    silent: float
    saturated: float


class SpikeRecorder:
    """Counts spikes while `enabled`, those of recomputed forwards once; `reduce` merges the counts of all ranks."""

    def __init__(self) -> None:
        self.enabled = False
        self._counts: dict[str, Tensor] = {}  # spikes of each neuron, and behind them the presentations of one

    @torch.no_grad()
    def observe(self, name: str, spikes: Tensor) -> None:
        """Adds spikes or counts `[T, N, C_local, ...]` of one layer and micro-batch, where enabled."""
        if not self.enabled:
            return
        fired = spikes.sum(dim=(0, 1), dtype=torch.float32).to(torch.int32).reshape(-1)
        count = F.pad(fired, (0, 1), value=spikes.shape[0] * spikes.shape[1])
        self._counts[name] = self._counts[name] + count if name in self._counts else count

    def reduce(self, same: dist.ProcessGroup | None, others: Sequence[dist.ProcessGroup | None]) -> list[LayerSpikes]:
        """Returns the statistics of this stage's layers, the same on all its ranks, and forgets the counts. Collective.

        Args:
            same: ranks that hold the same neurons; others: groups of ranks that hold other neurons of the same layers.
                None: a group of one rank.
        """
        counts, self._counts = self._counts, {}
        if not counts:
            return []
        if same is not None:  # in one all-reduce; all have observed the same layers
            flat = torch.cat([*counts.values()])
            dist.all_reduce(flat, group=same)
            counts = dict(zip(counts, flat.split([len(count) for count in counts.values()]), strict=True))
        sums = torch.stack([_sums(count) for count in counts.values()])
        for group in others:
            if group is not None:
                dist.all_reduce(sums, group=group)
        shares = (sums[:, 1:] / sums[:, :1]).tolist()
        return [LayerSpikes(name, *share) for name, share in zip(counts, shares, strict=True)]


class RasterRecorder:
    """Keeps the spikes of a few neurons of each layer, of the first micro-batch that passes while `enabled`."""

    def __init__(self) -> None:
        self.enabled = False
        self._rasters: dict[str, Tensor] = {}

    @torch.no_grad()
    def observe(self, name: str, spikes: Tensor) -> None:
        """Takes spikes `[T, N, C_local, ...]` of one layer, where enabled."""
        if not self.enabled or name in self._rasters:
            return
        few = spikes[:, :RASTER_SAMPLES].flatten(2)
        chosen = torch.linspace(0, few.shape[2] - 1, min(RASTER_NEURONS, few.shape[2]), device=few.device).long()
        self._rasters[name] = (few[..., chosen] != 0).permute(1, 2, 0)  # read when the step is over

    def take(self) -> dict[str, Raster]:
        """Returns the rasters of this stage, and forgets them."""
        found, self._rasters = self._rasters, {}
        return {name: raster.cpu().numpy() for name, raster in found.items()}


def mean_spikes(layers: Sequence[LayerSpikes]) -> dict[str, float]:
    """Returns the means over the layers as scalars `spikes/firing_rate`, ...; empty without layers."""
    names = ("firing_rate", "silent", "saturated") if layers else ()
    return {f"spikes/{name}": sum(getattr(layer, name) for layer in layers) / len(layers) for name in names}


def position_in_model(neuron: str, order: Sequence[str]) -> int:
    """Returns the place of the layer that a neuron belongs to by its global name; behind all where it has none."""
    fits = (position for position, layer in enumerate(order) if neuron == layer or neuron.startswith(f"{layer}."))
    return next(fits, len(order))


def _sums(count: Tensor) -> Tensor:
    """Returns float64 `[4]`: neurons, sum of their rates, silent neurons, saturated neurons."""
    spikes, presentations = count[:-1].double(), count[-1].double()
    number = torch.full_like(presentations, len(spikes))
    silent, saturated = (spikes == 0).sum(), (spikes >= presentations).sum()
    return torch.stack([number, spikes.sum() / presentations, silent.double(), saturated.double()])


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
