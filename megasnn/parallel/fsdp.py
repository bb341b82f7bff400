"""Weights that replicas keep by rows, and the whole of a segment while it is used (FSDP, arXiv 2304.11277).

A parameter stays the same object for its layer, of its full shape, but its memory comes and goes: all parameters of a
segment are places in one piece of memory, which is resized to nothing when they are freed. What autograd has saved of
them is a place in the same memory, and finds the values there when they are gathered again.

Ranks send each other rows, which are copied to their places when the segment is first used. On its way is what the
segment in use needs, and the one behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megasnn.parallel.sharding import ShardedTensor
from megasnn.parallel.zero import aligned, by_owner, joined, own_param_shard, send_shards, side_by_side
from megasnn.parallel_state import Group
from megasnn.schedule.passes import AT_ONCE


class GatheredWeights:
    """The weights of this rank's segments: what it keeps of them, and their gathering.

    What convolutions and linear layers multiply by travels in the type that they compute in, all else as it is.

    Args:
        group, scatter: the replicas that share one copy of the weights, for them and for gradients.
        give: gives the layers the values that a weight is multiplied by from now on, of the type that is computed in.

    Attributes:
        multiplied: the weights of convolutions and linear layers, whose gradients are the second part of a backward.
        shards: this rank's rows of each parameter, of which there may be none; a number is a row of one.
    """

    def __init__(self, group: Group, scatter: Group, give: Callable[[Tensor, Tensor], None]) -> None:
        self.scatter, self._group, self._give = scatter, group, give
        self.multiplied: set[Tensor] = set()
        self._segments: dict[int, list[FlatParameter]] = {}
        self._on_their_way: dict[int, list[Callable[[], None]]] = {}
        self.shards: dict[Tensor, nn.Parameter] = {}

    def shard(self, segment: int, layers: Sequence[nn.Module]) -> None:
        """Keeps this rank's rows of the parameters in these layers, which have their values, and frees all else.

        Raises:
            ValueError: rows do not follow each other in memory.
        """
        self.multiplied.update(_multiplied(layers))
        self._segments[segment] = []
        for (_, travels_in), parameters in _by_type(layers).items():
            flat = FlatParameter(parameters, travels_in, self._group)
            self._segments[segment].append(flat)
            self.shards |= zip(parameters, flat.shards, strict=True)
            for parameter, values in zip(parameters, flat.values, strict=True):
                if parameter in self.multiplied:
                    self._give(parameter, values)

    def local_part(self, entry: ShardedTensor) -> ShardedTensor:
        """Part of a tensor that this rank keeps: its rows of a parameter, all of a buffer."""
        if not entry.is_parameter:
            return entry
        return replace(entry, tensor=self.shards[entry.tensor], shard=entry.shard.by_rows("dp_shard"))

    def unshard(self, segment: int) -> None:
        """Starts gathering a segment's weights. Collective over the group.

        Waits for those that are longest on their way, where these are as many as may be, which bounds the memory.
        """
        if len(self._on_their_way) == AT_ONCE:
            self.wait_unshard(next(iter(self._on_their_way)))
        self._on_their_way[segment] = [flat.start() for flat in self._segments[segment]]

    def wait_unshard(self, segment: int) -> None:
        """Waits until a segment's weights are here, where they are on their way. That they were gathered is the
        schedule's business."""
        for finish in self._on_their_way.pop(segment, ()):
            finish()

    def reshard(self, segment: int) -> None:
        """Frees a segment's gathered weights."""
        self.wait_unshard(segment)
        for flat in self._segments[segment]:
            flat.free()


class FlatParameter:
    """Parameters of a segment that are of one type and travel in one type, in one piece of memory.

    Attributes:
        shards: this rank's, of each parameter.
        values: of each parameter, in the type that they travel in; without memory until they are gathered.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], travels_in: torch.dtype, group: Group) -> None:
        self._group = group
        sizes = [aligned(each.numel() * travels_in.itemsize) // travels_in.itemsize for each in parameters]
        flat = torch.empty(sum(sizes), dtype=travels_in, device=parameters[0].device)
        self._storage, self._bytes = flat.untyped_storage(), flat.nbytes
        # Tensors that autograd saves are to know nothing of what is written here: `data` has a version of its own.
        views = side_by_side(parameters, flat, sizes)
        self.values, self._of_ranks = [each.data for each in views], by_owner(views, group)
        self._counts = [sum(part.numel() for part in parts) for parts in self._of_ranks]
        mine = by_owner(parameters, group)[group.rank]
        with torch.no_grad():
            self._mine = joined([part.detach() for part in mine], parameters[0].detach()).clone()
        own = [own_param_shard(each, group) for each in parameters]
        shards = side_by_side(own, self._mine, [each.numel() for each in own])
        self.shards = [
            nn.Parameter(each, requires_grad=parameter.requires_grad)
            for each, parameter in zip(shards, parameters, strict=True)
        ]
        for parameter, values in zip(parameters, self.values, strict=True):
            if values.dtype == parameter.dtype:
                parameter.data = values
            else:  # only multiplied by, in another type: nothing reads its own values
                parameter.data = torch.empty_like(parameter, requires_grad=False)
                parameter.untyped_storage().resize_(0)
        self.free()

    def start(self) -> Callable[[], None]:
        """Starts sending this rank's rows to the others; the returned function waits for theirs, and copies all of them
        to their places."""
        # An all-gather would need no copies, but reaches a tenth of an all-to-all's speed on Gloo, and wants equally
        # many rows.
        mine = self._mine.to(self.values[0].dtype)
        copy_of_others = send_shards(mine, self._counts, self._of_ranks, self._group)

        def finish() -> None:
            self._storage.resize_(self._bytes)
            if mine := self._of_ranks[self._group.rank]:
                torch._foreach_copy_(mine, list(self._mine.split([each.numel() for each in mine])))
            copy_of_others()

        return finish

    def free(self) -> None:
        if not self._storage.resizable():
            raise ValueError("a module made a NumPy array of a gathered weight (weight.numpy()): let it take a copy")
        self._storage.resize_(0)


def _multiplied(layers: Iterable[nn.Module]) -> Mapping[Tensor, torch.dtype]:
    """The weights that layers take from `CastWeights`, and the types these compute in."""
    modules: Iterable[Any] = (module for layer in layers for module in layer.modules())
    return {
        module.weight: module.compute_dtype
        for module in modules
        if vars(type(module)).get("multiplies_by_weight")  # a subclass may use its weight otherwise
    }


def _by_type(layers: Sequence[nn.Module]) -> dict[tuple[torch.dtype, torch.dtype], list[nn.Parameter]]:
    """Parameters, each once, by their type and the one that they travel in."""
    multiplied = _multiplied(layers)
    by_type: dict[tuple[torch.dtype, torch.dtype], list[nn.Parameter]] = {}
    for parameter in dict.fromkeys(each for layer in layers for each in layer.parameters()):
        travels_in = multiplied.get(parameter, parameter.dtype)
        by_type.setdefault((parameter.dtype, travels_in), []).append(parameter)
    return by_type


def segment_bytes(layers: Sequence[nn.Module]) -> int:
    """Bytes of the gathered weights of a segment. Its layers may be on the meta device."""
    by_type = _by_type(layers).items()
    return sum(aligned(each.numel() * to.itemsize) for (_, to), parameters in by_type for each in parameters)
