"""How often the neurons of each layer fire: firing rate and the shares of silent and of saturated neurons.

Whether a neuron is silent is known only when all its presentations are. So the spikes of the data-parallel
ranks, and of those that share their micro-batches by samples, are added up neuron by neuron first; after that the
neurons of all tensor-parallel ranks, and of those that share images by rows, are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class LayerSpikes:
    """Statistics of one layer of neurons, a neuron being one channel at one place.

    Attributes:
        firing_rate: spikes per neuron and time step, between 0 and 1.
        silent: share of the neurons that never fired.
        saturated: share of the neurons that fired at every step of every sample.
    """

    name: str
    firing_rate: float
    silent: float
    saturated: float


@dataclass
class _Count:
    """Spikes of each local neuron, and how often each of them was asked (steps x samples)."""

    spikes: Tensor
    presentations: int


class SpikeRecorder:
    """Counts the spikes of this rank's layers while it is enabled; `reduce` merges the counts of all ranks.

    A layer of neurons calls ``recorder.observe(name, spikes)`` for each micro-batch, under its global name. It must not
    be enabled where forward passes are recomputed: they would count twice.
    """

    def __init__(self) -> None:
        self.enabled = False
        self._counts: dict[str, _Count] = {}

    @torch.no_grad()
    def observe(self, name: str, spikes: Tensor) -> None:
        """Adds the spikes of one micro-batch; nothing happens unless enabled.

        Args:
            spikes: zeros and ones ``[T, N, C_local, ...]``; N may differ from call to call, the rest may not.
        """
        if not self.enabled:
            return
        fired = spikes.sum(dim=(0, 1), dtype=torch.float32).to(torch.int32).reshape(-1)
        presentations = spikes.shape[0] * spikes.shape[1]
        count = self._counts.get(name)
        if count is None:
            self._counts[name] = _Count(fired, presentations)
            return
        if count.spikes.shape != fired.shape:
            raise ValueError(
                f"layer '{name}' had {count.spikes.numel()} neurons on this rank, now it has {fired.numel()}"
            )
        count.spikes += fired
        count.presentations += presentations

    def forget(self) -> None:
        """Forgets the counts."""
        self._counts.clear()

    def reduce(
        self,
        data_group: dist.ProcessGroup | None,
        tensor_group: dist.ProcessGroup | None,
        pipeline_group: dist.ProcessGroup | None,
        order: Sequence[str] | None = None,
        rows_group: dist.ProcessGroup | None = None,
    ) -> list[LayerSpikes]:
        """Statistics of the layers of all ranks, the same list on every rank, and forgets the counts.

        A collective over all groups; None stands for a group of one rank. A data-parallel rank that had
        no micro-batch, and so observed nothing, takes part like the others.

        Args:
            order: the names of the model's layers, which those of their neurons begin with, in the order of the
                network. None: pipeline ranks one after the other, each in the order of its observations: the
                network's, unless stages are virtual.
            rows_group: the ranks that have other rows of the same images, and all of those layers that have no rows.

        Raises:
            ValueError: data-parallel ranks disagree on the size of a layer, or `order` lacks a layer.
        """
        mine, self._counts = self._counts, {}
        counts = _add_over_data(mine, data_group)
        layers = _merge_parts(counts, (tensor_group, rows_group))
        if pipeline_group is not None:
            of_stages: list[list[LayerSpikes]] = [[] for _ in range(pipeline_group.size())]
            dist.all_gather_object(of_stages, layers, group=pipeline_group)
            layers = [layer for stage in of_stages for layer in stage]
        return layers if order is None else _sorted(layers, order)


def mean_spikes(layers: Sequence[LayerSpikes]) -> dict[str, float]:
    """The means over the layers as scalars: ``spikes/firing_rate``, and so on; empty without layers."""
    names = ("firing_rate", "silent", "saturated") if layers else ()
    return {f"spikes/{name}": sum(getattr(layer, name) for layer in layers) / len(layers) for name in names}


def place_in_model(neuron: str, layers: Mapping[str, int]) -> int:
    """The place of the layer that a neuron belongs to, by its global name; behind all others where it has none.

    Args:
        layers: names of the model's layers, which those of their neurons begin with, and their places.
    """
    parts = neuron.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((layers[prefix] for prefix in prefixes if prefix in layers), len(layers))


def _add_over_data(counts: dict[str, _Count], group: dist.ProcessGroup | None) -> dict[str, _Count]:
    """Adds the counts of the data-parallel ranks, neuron by neuron, in one all-reduce."""
    if group is None:
        return counts
    mine = {name: (count.spikes.numel(), count.presentations) for name, count in counts.items()}
    of_ranks: list[dict[str, tuple[int, int]]] = [{} for _ in range(group.size())]
    dist.all_gather_object(of_ranks, mine, group=group)
    neurons, presentations = _agree(of_ranks)
    if not neurons:
        return {}
    device = next((count.spikes.device for count in counts.values()), _device_of(group))
    parts = [
        counts[name].spikes if name in counts else torch.zeros(size, dtype=torch.int32, device=device)
        for name, size in neurons.items()
    ]
    flat = torch.cat(parts)
    dist.all_reduce(flat, group=group)
    spikes = flat.split(list(neurons.values()))
    return {name: _Count(part, presentations[name]) for name, part in zip(neurons, spikes, strict=True)}


def _agree(of_ranks: list[dict[str, tuple[int, int]]]) -> tuple[dict[str, int], dict[str, int]]:
    """Neurons and total presentations of each layer, in the order in which the ranks name them."""
    neurons: dict[str, int] = {}
    presentations: dict[str, int] = {}
    for rank, layers in enumerate(of_ranks):
        for name, (size, presented) in layers.items():
            if neurons.setdefault(name, size) != size:
                raise ValueError(
                    f"layer '{name}' has {size} neurons on data-parallel rank {rank} but {neurons[name]} on "
                    "a rank before it: all data-parallel ranks must hold the same shard"
                )
            presentations[name] = presentations.get(name, 0) + presented
    return neurons, presentations


def _merge_parts(counts: dict[str, _Count], groups: Sequence[dist.ProcessGroup | None]) -> list[LayerSpikes]:
    """Rates and shares of each layer over all ranks' channels and rows, in a small all-reduce for each group."""
    if not counts:
        return []
    sums = torch.stack([_sums(count) for count in counts.values()])
    for group in groups:
        if group is not None:
            dist.all_reduce(sums, group=group)
    shares = (sums[:, 1:] / sums[:, :1]).tolist()
    return [LayerSpikes(name, *share) for name, share in zip(counts, shares, strict=True)]


def _sums(count: _Count) -> Tensor:
    """Neurons, sum of their rates, silent neurons, saturated neurons: float64 ``[4]``."""
    spikes = count.spikes.double()
    return torch.stack(
        [
            torch.full_like(spikes[0], spikes.numel()),
            spikes.sum() / count.presentations,
            (count.spikes == 0).sum().double(),
            (count.spikes == count.presentations).sum().double(),
        ]
    )


def _sorted(layers: list[LayerSpikes], order: Sequence[str]) -> list[LayerSpikes]:
    places = {name: place for place, name in enumerate(order)}
    unknown = [layer.name for layer in layers if place_in_model(layer.name, places) == len(places)]
    if unknown:
        raise ValueError(f"layers {unknown} have spikes but are not among the {len(places)} of `order`")
    return sorted(layers, key=lambda layer: place_in_model(layer.name, places))


def _device_of(group: dist.ProcessGroup) -> torch.device:
    on_cuda = "nccl" in dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
