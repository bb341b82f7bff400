"""Spikes of each layer: firing rate, shares of silent and saturated neurons, and rasters of a few neurons.

A neuron is silent only if no presentation makes it fire. So the spikes of ranks that hold the same neurons (replicas,
and ranks that share micro-batches by samples) are added up neuron by neuron; then the neurons of ranks that hold others
(tensor parallel ones, and those that share images by rows) are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

RASTER_NEURONS, RASTER_SAMPLES = 32, 4

Raster = NDArray[np.bool_]
"""[samples, neurons, T]: which neurons fired when."""


@dataclass(frozen=True)
class LayerSpikes:
    """Statistics of a layer; a neuron is one channel at one place.

    Attributes:
        firing_rate: spikes per neuron and time step. silent: share of neurons that never fired.
        saturated: share of neurons that fired at every step of every sample.
    """

    name: str
    firing_rate: float
    silent: float
    saturated: float


@dataclass
class _Count:
    """Spikes `[neurons]` of this rank's neurons, and presentations (steps x samples) of each."""

    spikes: Tensor
    presentations: int


class SpikeRecorder:
    """Counts spikes while `enabled`; `reduce` merges the counts of all ranks.

    It must not be enabled where forwards are recomputed: they would count twice.
    """

    def __init__(self) -> None:
        self.enabled = False
        self._counts: dict[str, _Count] = {}

    @torch.no_grad()
    def observe(self, name: str, spikes: Tensor) -> None:
        """Adds zeros and ones `[T, N, C_local, ...]` of one layer and micro-batch, where enabled."""
        if not self.enabled:
            return
        fired = spikes.sum(dim=(0, 1), dtype=torch.float32).to(torch.int32).reshape(-1)
        count = self._counts.setdefault(name, _Count(torch.zeros_like(fired), 0))
        count.spikes += fired
        count.presentations += spikes.shape[0] * spikes.shape[1]

    def reduce(
        self,
        same: dist.ProcessGroup | None,
        others: Sequence[dist.ProcessGroup | None],
    ) -> list[LayerSpikes]:
        """Returns the statistics of this stage's layers, the same on all its ranks, and forgets the counts. Collective.

        Args:
            same: ranks that hold the same neurons; others: groups of ranks that hold other neurons of the same layers.
                None: a group of one rank.
        """
        counts, self._counts = _sum_counts(self._counts, same), {}
        return _statistics(counts, others)


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


def place_in_model(neuron: str, order: Sequence[str]) -> int:
    """Returns the place of the layer that a neuron belongs to by its global name; behind all where it has none."""
    fits = (place for place, layer in enumerate(order) if neuron == layer or neuron.startswith(f"{layer}."))
    return next(fits, len(order))


def _sum_counts(counts: dict[str, _Count], group: dist.ProcessGroup | None) -> dict[str, _Count]:
    """Adds counts neuron by neuron, in one all-reduce; all ranks have observed the same layers."""
    if group is None or not counts:
        return counts
    presented: list[dict[str, int]] = [{} for _ in range(group.size())]
    dist.all_gather_object(presented, {name: count.presentations for name, count in counts.items()}, group=group)
    flat = torch.cat([count.spikes for count in counts.values()])
    dist.all_reduce(flat, group=group)
    parts = flat.split([count.spikes.numel() for count in counts.values()])
    summed = zip(counts, parts, strict=True)
    return {name: _Count(part, sum(each[name] for each in presented)) for name, part in summed}


def _statistics(counts: Mapping[str, _Count], groups: Sequence[dist.ProcessGroup | None]) -> list[LayerSpikes]:
    """Computes rates and shares over the channels and rows of all ranks, in a small all-reduce for each group."""
    if not counts:
        return []
    sums = torch.stack([_sums(count) for count in counts.values()])
    for group in groups:
        if group is not None:
            dist.all_reduce(sums, group=group)
    shares = (sums[:, 1:] / sums[:, :1]).tolist()
    return [LayerSpikes(name, *share) for name, share in zip(counts, shares, strict=True)]


def _sums(count: _Count) -> Tensor:
    """Returns float64 `[4]`: neurons, sum of their rates, silent neurons, saturated neurons."""
    spikes = count.spikes.double()
    number = torch.full_like(spikes[0], spikes.numel())
    silent, saturated = (count.spikes == 0).sum(), (count.spikes == count.presentations).sum()
    return torch.stack([number, spikes.sum() / count.presentations, silent.double(), saturated.double()])
