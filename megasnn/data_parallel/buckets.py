"""Gradients of a rank's parameters in contiguous buckets, summed over the data-parallel replicas during backward.

Gradients are sums already (each micro-batch's loss is divided by the global batch size), so that the reduction is a
sum too and uneven shares need no weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from weakref import WeakMethod

import torch
from torch import Tensor

from megasnn.comm.collectives import all_reduce_sum, exchange_bytes, start_all_reduce_sum
from megasnn.comm.group import Group
from megasnn.data_parallel.owned_rows import OwnedRows
from megasnn.sharding import ShardedTensor

BUCKET_BYTES = 8 * 1024 * 1024  # on a CPU
ALIGNMENT = 64  # bytes, as of torch's own tensors on the CPU


def _never() -> bool:
    return False


class _Bucket:
    """Some parameters' gradients side by side in one tensor; `param.grad` are views of it.

    Attributes:
        due: how many gradients are still to be added to each parameter that is not complete.
        finish: waits for the sum over the replicas; None where none is on its way.
        is_complete: whether that would end at once.
        owned: the rows that this rank owns; None where every replica is to have the whole sum.
    """

    def __init__(self, chunk: int, parameters: list[Tensor], partial: bool, owners: Group | None) -> None:
        self.chunk, self.parameters, self.partial = chunk, parameters, partial
        first = parameters[0]
        # A product of matrices may sum in another order at another alignment, and a parameter's neighbours in a bucket
        # depend on the layout: each begins at a multiple of ALIGNMENT.
        step = ALIGNMENT // first.itemsize
        places = [-(-p.numel() // step) * step for p in parameters]
        self.flat = torch.zeros(sum(places), dtype=first.dtype, device=first.device)
        self.due: dict[Tensor, int] = {}
        self.finish: Callable[[], object] | None = None
        self.is_complete: Callable[[], bool] = _never
        offset = 0
        self.views = []
        for parameter, place in zip(parameters, places, strict=True):
            # In the memory order of the parameter, as the optimizer wants it.
            self.views.append(self.flat.as_strided(parameter.shape, parameter.stride(), offset))
            offset += place
        self.owned = None if owners is None else OwnedRows(parameters, self.views, owners)

    def end(self) -> None:
        """Waits for the sum over the replicas, where one is on its way."""
        if self.finish is not None:
            self.finish()
            self.finish, self.is_complete = None, _never  # which hold what has been sent and received

    def attach(self) -> None:
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view
        if self.owned is not None:
            self.owned.attach()


class BucketedDataParallel:
    """Gradient storage and reduction for the chunks of one rank, in every combination with TP and PP.

    Buckets are filled from the last parameter to the first, the order in which backward finishes them, and are reduced
    in one order on every replica, from the last chunk to the first, each as soon as it and all before it are complete:
    replicas with other numbers of micro-batches finish their chunks in another order, and their collectives must still
    meet. A parameter is complete when all gradients of the step's micro-batches were added to it. One with
    `partial_gradient` is summed over the tensor-parallel group first. Frozen parameters have no gradient.

    Where rows have owners, a replica gets the sums of its own rows only; what the gradients of parameters hold behind
    that is the replica's own part.

    Args:
        tensors: (chunk index, that chunk's tensors).
        data, tensor: the groups.
        bucket_bytes: a bucket is closed when it holds at least this much; None for what suits the device.
        additions: how many gradients a micro-batch adds to a parameter, where that is not one.
        rows_have_owners: whether each row of a parameter belongs to one of the replicas.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[int, list[ShardedTensor]]],
        data: Group,
        tensor: Group,
        bucket_bytes: int | None = None,
        additions: Mapping[Tensor, int] | None = None,
        rows_have_owners: bool = False,
    ) -> None:
        owners = data if rows_have_owners and data.size > 1 else None
        self._data, self._tensor, self._additions = data, tensor, additions or {}
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[Tensor, _Bucket] = {}
        self._next = 0
        for chunk, entries in sorted(tensors, key=lambda pair: -pair[0]):
            trained = [e for e in reversed(entries) if e.is_parameter and e.tensor.requires_grad]
            whole = [e.tensor for e in trained if "tensor" not in e.shard.partial_gradient]
            partial = [e.tensor for e in trained if "tensor" in e.shard.partial_gradient]
            if whole:
                most = bucket_bytes or exchange_bytes(data, whole[0].device, BUCKET_BYTES)
                self._buckets += [_Bucket(chunk, group, False, owners) for group in _packed(whole, most)]
            # Partial gradients are a handful of scalars: they come last, in a bucket of their own.
            self._buckets += [_Bucket(chunk, partial, True, owners)] if partial else []
        self._rows = {
            parameter: rows
            for bucket in self._buckets
            if bucket.owned is not None
            for parameter, rows in zip(bucket.parameters, bucket.owned.rows, strict=True)
        }
        # A parameter keeps its hooks, and Python finds no circle through a tensor: with a hook that kept this object,
        # neither it nor weights and gradients would ever be freed.
        accumulated = WeakMethod(self.accumulated)

        def count(parameter: Tensor) -> None:
            if (count_here := accumulated()) is not None:
                count_here(parameter)

        for bucket in self._buckets:
            for parameter in bucket.parameters:
                self._bucket_of[parameter] = bucket
                parameter.register_post_accumulate_grad_hook(count)
        self.zero()

    def zero(self, micro_batches: int = 1) -> None:
        """Before each step of so many micro-batches: gradients to zero, in place."""
        self._next = 0
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.attach()
            bucket.due = {each: micro_batches * self._additions.get(each, 1) for each in bucket.parameters}

    def accumulated(self, parameter: Tensor) -> None:
        """To be called when a gradient was added other than by autograd, whose hooks call it too.

        Raises:
            ValueError: more were added than the dry run has shown.
        """
        due = self._bucket_of[parameter].due
        if parameter not in due:
            raise ValueError(
                f"a layer with a weight of shape {list(parameter.shape)} was called more often than in the dry run: "
                "let every forward call it as often"
            )
        due[parameter] -= 1
        if due[parameter] == 0:
            del due[parameter]
            self._reduce_complete()

    def finish(self, chunk: int) -> None:
        """The chunk's gradients are done; a parameter that took no part in backward keeps a zero gradient."""
        for bucket in self._buckets:
            if bucket.chunk == chunk:
                bucket.due.clear()
        self._reduce_complete()

    def wait(self) -> None:
        """Until everything that could be reduced is."""
        for bucket in self._buckets:
            bucket.end()

    def owned(self, entry: ShardedTensor) -> ShardedTensor:
        """What this rank owns of a tensor, with a gradient of its own: all of it where its rows have no owners.

        Raises:
            ValueError: the tensor's description does not know of the replicas.
        """
        rows = self._rows.get(entry.tensor)
        if rows is None:
            return entry
        shard = entry.shard.by_rows("data")
        if shard.local_shape != rows.shape:
            raise ValueError(
                f"{entry.name} was described without its {self._data.size} replicas: BuildContext(data=...)"
            )
        return replace(entry, tensor=rows, shard=shard)

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """The reduced gradient of a parameter, or of those of its rows that this rank owns."""
        return self._rows.get(parameter, parameter).grad

    def share_rows(self) -> None:
        """After owners have changed their rows: gives them to all replicas. Collective over the replicas; does nothing
        where rows have no owners."""
        under_way = deque[Callable[[], object]]()
        for bucket in self._buckets:
            if bucket.owned is not None:
                under_way.append(bucket.owned.start_sharing())
                if len(under_way) > 1:  # two at a time, which bounds the memory
                    under_way.popleft()()
        while under_way:
            under_way.popleft()()

    def _reduce_complete(self) -> None:
        while self._next < len(self._buckets) and not self._buckets[self._next].due:
            self._reduce(self._buckets[self._next])
            self._next += 1

    def _reduce(self, bucket: _Bucket) -> None:
        if bucket.partial:
            all_reduce_sum(bucket.flat, self._tensor, "backward")
        if bucket.owned is not None:
            self._finish_complete()
            exchange, bucket.finish = bucket.owned.start_sum("backward")
            bucket.is_complete = lambda: exchange.is_complete
        elif self._data.size > 1:
            bucket.finish = start_all_reduce_sum(bucket.flat, self._data, "backward")

    def _finish_complete(self) -> None:
        """Frees the memory of what has come already."""
        for bucket in self._buckets:
            if bucket.is_complete():
                bucket.end()


def _packed(parameters: list[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    groups: list[list[Tensor]] = []
    size = bucket_bytes
    for parameter in parameters:
        if size >= bucket_bytes or groups[-1][0].dtype != parameter.dtype:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += parameter.nbytes
    return groups
