"""Spike statistics by layer: firing rate, silent and saturated neurons, rasters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

RASTER_NEURONS = 32
RASTER_SAMPLES = 4

Raster = NDArray[np.bool_]
"""`[samples, neurons, T]`: True for a spike."""


@dataclass(frozen=True)
class LayerSpikes:
    """A neuron is one channel at one pixel.

    Attributes:
        firing_rate: spikes per neuron and time step; may exceed 1 with integer neurons.
        silent: share that never fired on any rank.
        saturated: share with a firing rate at or above 1.
    """

    name: str
    firing_rate: float
    silent: float
    saturated: float


class SpikeRecorder:
    """Counts spikes by layer while `enabled`; `reduce` merges all ranks."""

    def __init__(self) -> None:
        self.enabled = False
        self._counts: dict[str, Tensor] = {}  # spikes of each neuron; the last entry is samples x time steps

    @torch.no_grad()
    def observe(self, name: str, spikes: Tensor) -> None:
        """Adds one micro-batch: spikes or counts `[T, N, C_local, ...]`. A negative spike counts as one."""
        if not self.enabled:
            return
        # bfloat16 counts exactly up to 256 only, float32 up to 2^24.
        wide = torch.promote_types(spikes.dtype, torch.float32)
        if spikes.is_floating_point():
            fired = torch.linalg.vector_norm(spikes, ord=1, dim=(0, 1), dtype=wide)
        else:
            fired = spikes.sum(dim=(0, 1), dtype=wide)
        fired = fired.to(torch.int32).reshape(-1)
        count = F.pad(fired, (0, 1), value=spikes.shape[0] * spikes.shape[1])
        if name in self._counts:
            count = self._counts[name] + count
        self._counts[name] = count

    def reduce(self, same: dist.ProcessGroup | None, others: Sequence[dist.ProcessGroup | None]) -> list[LayerSpikes]:
        """Returns this stage's statistics on all its ranks, and resets the counts. Collective.

        Args:
            same: ranks with the same neurons; None for one rank.
            others: groups of ranks with the layer's other neurons; None for one rank.
        """
        counts = self._counts
        self._counts = {}
        if not counts:
            return []
        # A neuron is silent if no sample on any rank makes it fire. So spikes are first added over ranks with the same
        # neurons (data parallel, context parallel by samples). Then neurons are counted, over ranks with other neurons
        # (tensor parallel, context parallel by rows or tokens).
        if same is not None:
            # One all-reduce for all layers: every rank of the group has observed the same ones in the same order.
            flat = torch.cat([*counts.values()])
            dist.all_reduce(flat, group=same)
            sizes = [len(count) for count in counts.values()]
            counts = dict(zip(counts, flat.split(sizes), strict=True))
        sums = torch.stack([_sums(count) for count in counts.values()])
        for group in others:
            if group is not None:
                dist.all_reduce(sums, group=group)
        rates = (sums[:, 1:] / sums[:, :1]).tolist()
        return [LayerSpikes(name, *of_layer) for name, of_layer in zip(counts, rates, strict=True)]


class RasterRecorder:
    """Records a few neurons by layer while `enabled`, in the first micro-batch."""

    def __init__(self) -> None:
        self.enabled = False
        self._rasters: dict[str, Tensor] = {}

    @torch.no_grad()
    def observe(self, name: str, spikes: Tensor) -> None:
        """Records spikes `[T, N, C_local, ...]`."""
        if not self.enabled or name in self._rasters:
            return
        few = spikes[:, :RASTER_SAMPLES].flatten(2)
        neurons = few.shape[2]
        chosen = torch.linspace(0, neurons - 1, min(RASTER_NEURONS, neurons), device=few.device).long()
        # Stays on the device: a copy to the host here would wait in the middle of a step.
        self._rasters[name] = (few[..., chosen] != 0).permute(1, 2, 0)

    def take(self) -> dict[str, Raster]:
        """Returns and resets this stage's rasters."""
        rasters = self._rasters
        self._rasters = {}
        return {name: raster.cpu().numpy() for name, raster in rasters.items()}


def mean_spikes(layers: Sequence[LayerSpikes]) -> dict[str, float]:
    """Means over layers by TensorBoard name; empty without layers."""
    if not layers:
        return {}
    scalars = {}
    for name in ("firing_rate", "silent", "saturated"):
        scalars[f"spikes/{name}"] = sum(getattr(layer, name) for layer in layers) / len(layers)
    return scalars


def position_in_model(module: str, order: Sequence[str]) -> int:
    """Index in `order` of the layer that contains a module; len(order) without one."""
    for position, layer in enumerate(order):
        if module == layer or module.startswith(f"{layer}."):
            return position
    return len(order)


def _sums(count: Tensor) -> Tensor:
    """float64 `[4]`: number of neurons, sum of their rates, silent neurons, saturated neurons."""
    spikes = count[:-1].double()
    presentations = count[-1].double()
    number = torch.full_like(presentations, len(spikes))
    silent = (spikes == 0).sum()
    # Above 1 with integer neurons, which fire several times in a step.
    saturated = (spikes >= presentations).sum()
    return torch.stack([number, spikes.sum() / presentations, silent.double(), saturated.double()])
