"""Weights sharded by rows over replicas, gathered one segment at a time (FSDP, arXiv 2304.11277)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megasnn.parallel.sharding import ShardedTensor
from megasnn.parallel.zero import (
    ShardGather,
    aligned,
    by_owner,
    elements_by_rank,
    joined,
    own_param_shard,
    side_by_side,
)
from megasnn.parallel_state import Group
from megasnn.schedule.passes import AT_ONCE


class GatheredWeights:
    """This rank's shards of its segments' weights, and their gathering.

    Args:
        scatter: the ranks in `group`, for gradients.
        give: called with a weight and its gathered values in the compute type.

    Attributes:
        multiplied: weights of convolutions and linear layers, which travel in their compute type.
        shards: by parameter, possibly empty.
    """

    def __init__(self, group: Group, scatter: Group, give: Callable[[Tensor, Tensor], None]) -> None:
        self.scatter = scatter
        self.multiplied: set[Tensor] = set()
        self.shards: dict[Tensor, nn.Parameter] = {}
        self._group = group
        self._give = give
        self._segments: dict[int, list[FlatParameter]] = {}
        self._in_flight: dict[int, list[Callable[[], None]]] = {}

    def shard(self, segment: int, layers: Sequence[nn.Module]) -> None:
        """Keeps this rank's shards and frees the rest.

        Raises ValueError if a parameter's rows are not contiguous in memory.
        """
        self.multiplied.update(_multiplied(layers))
        self._segments[segment] = []
        for (_, travel_dtype), parameters in _by_dtype(layers).items():
            flat = FlatParameter(parameters, travel_dtype, self._group)
            self._segments[segment].append(flat)
            self.shards |= zip(parameters, flat.shards, strict=True)
            for parameter, values in zip(parameters, flat.values, strict=True):
                if parameter in self.multiplied:
                    self._give(parameter, values)

    def local_part(self, entry: ShardedTensor) -> ShardedTensor:
        """A parameter's own shard; a whole buffer."""
        if not entry.is_parameter:
            return entry
        return replace(entry, tensor=self.shards[entry.tensor], shard=entry.shard.by_rows("dp_shard"))

    def unshard(self, segment: int) -> None:
        """Starts gathering. Collective."""
        # Bounds the memory: the oldest gather must end first.
        if len(self._in_flight) == AT_ONCE:
            self.wait_unshard(next(iter(self._in_flight)))
        self._in_flight[segment] = []
        for flat in self._segments[segment]:
            self._in_flight[segment].append(flat.start())

    def wait_unshard(self, segment: int) -> None:
        for finish in self._in_flight.pop(segment, ()):
            finish()

    def reshard(self, segment: int) -> None:
        self.wait_unshard(segment)
        for flat in self._segments[segment]:
            flat.free()


class FlatParameter:
    """Parameters with one type and one travel type, in one storage.

    Attributes:
        values: gathered, by parameter, in the travel type; without memory between gathers.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], travel_dtype: torch.dtype, group: Group) -> None:
        self._travel_dtype = travel_dtype
        itemsize = travel_dtype.itemsize
        sizes = [aligned(each.numel() * itemsize) // itemsize for each in parameters]
        flat = torch.empty(sum(sizes), dtype=travel_dtype, device=parameters[0].device)
        # Resized to zero bytes between gathers. A parameter stays one object of full shape for its layer, and tensors
        # saved by autograd are views of this storage as well.
        self._storage = flat.untyped_storage()
        self._bytes = flat.nbytes
        views = side_by_side(parameters, flat, sizes)
        # `data` has a version counter of its own: gathering must not invalidate tensors saved by autograd.
        self.values = [view.data for view in views]
        destinations = by_owner(views, group)
        self._gather = ShardGather(elements_by_rank(destinations), destinations, group)
        self._own, self.shards = _own_shards(parameters, group)
        for parameter, values in zip(parameters, self.values, strict=True):
            if values.dtype == parameter.dtype:
                parameter.data = values
            else:
                # Layers read `values` instead, so that the parameter needs no memory.
                parameter.data = torch.empty_like(parameter, requires_grad=False)
                parameter.untyped_storage().resize_(0)
        self.free()

    def start(self) -> Callable[[], None]:
        """Starts sending this rank's shards. The returned function waits, and fills the storage."""
        # An all-gather would save the copies. On Gloo it reaches a tenth of an all-to-all's speed, and it wants equal
        # sizes.
        return partial(self._finish, self._gather.start(self._own.to(self._travel_dtype)))

    def _finish(self, fill: Callable[[], None]) -> None:
        self._storage.resize_(self._bytes)
        fill()

    def free(self) -> None:
        if not self._storage.resizable():
            raise ValueError(
                "a module shares the memory of a gathered weight with NumPy (weight.numpy()), so that it cannot be "
                "freed: use weight.numpy().copy(), or remove --weight-parallel-size"
            )
        self._storage.resize_(0)


def _own_shards(parameters: Sequence[nn.Parameter], group: Group) -> tuple[Tensor, list[nn.Parameter]]:
    """A copy of this rank's rows, `[n]`, and each parameter's shard as a view of it."""
    own = joined(by_owner(parameters, group)[group.rank], parameters[0])
    rows = [own_param_shard(each, group) for each in parameters]
    views = side_by_side(rows, own, [each.numel() for each in rows])
    shards = []
    for parameter, view in zip(parameters, views, strict=True):
        shards.append(nn.Parameter(view, requires_grad=parameter.requires_grad))
    return own, shards


def _multiplied(layers: Iterable[nn.Module]) -> Mapping[Tensor, torch.dtype]:
    """Compute type by weight that a layer reads through `CastWeights`."""
    dtypes: dict[Tensor, torch.dtype] = {}
    for layer in layers:
        for module in layer.modules():
            # See `LayerTraits` in megasnn/layers/layer.py: a derived class may use its weight in another way.
            if vars(type(module)).get("multiplies_by_weight"):
                weighted: Any = module
                dtypes[weighted.weight] = weighted.compute_dtype
    return dtypes


def _by_dtype(layers: Sequence[nn.Module]) -> dict[tuple[torch.dtype, torch.dtype], list[nn.Parameter]]:
    compute_dtypes = _multiplied(layers)
    distinct: dict[nn.Parameter, None] = {}
    for layer in layers:
        distinct |= dict.fromkeys(layer.parameters())
    by_dtype: dict[tuple[torch.dtype, torch.dtype], list[nn.Parameter]] = {}
    for parameter in distinct:
        travel_dtype = compute_dtypes.get(parameter, parameter.dtype)
        by_dtype.setdefault((parameter.dtype, travel_dtype), []).append(parameter)
    return by_dtype


def segment_bytes(layers: Sequence[nn.Module]) -> int:
    """A segment's gathered bytes. Layers may be on the meta device."""
    total = 0
    for (_, travel_dtype), parameters in _by_dtype(layers).items():
        total += sum(aligned(each.numel() * travel_dtype.itemsize) for each in parameters)
    return total
