"""Spikes of each layer: firing rate, shares of silent and saturated neurons, and rasters of a few neurons.

A neuron is silent only if no presentation makes it fire. So the spikes of ranks that hold the same neurons (replicas,
and ranks that share micro-batches by samples) are added up neuron by neuron; then the neurons of ranks that hold others
(tensor parallel ones, and those that share images by rows) are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

RASTER_NEURONS, RASTER_SAMPLES = 32, 4

Raster = NDArray[np.bool_]
"""[samples, neurons, T]: which neurons fired when."""


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
