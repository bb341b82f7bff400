"""Gradients of a rank's parameters in contiguous buckets, summed over the data-parallel replicas during backward.

Gradients are sums already (each micro-batch's loss is divided by the global batch size), so that the reduction is a
sum too and uneven shares need no weights.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.comm.collectives import all_reduce_sum
from megasnn.comm.group import Group
from megasnn.comm.statistics import statistics
from megasnn.sharding import ShardedTensor

BUCKET_BYTES = 8 * 1024 * 1024


class _Bucket:
    """Some parameters' gradients side by side in one tensor; `param.grad` are views of it."""

    def __init__(self, parameters: list[Tensor], partial: bool) -> None:
        self.parameters, self.partial = parameters, partial
        first = parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        self.waiting: set[int] = set()
        self.work: dist.Work | None = None
        offset = 0
        self.views = []
        for parameter in parameters:
            self.views.append(self.flat[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()

    def attach(self) -> None:
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view


class BucketedDataParallel:
    """Gradient storage and reduction for the chunks of one rank, in every combination with TP and PP.

    Buckets are filled from the last parameter to the first, the order in which backward finishes them, and are reduced
    in that order on every replica, each as soon as it and all before it are complete. A parameter with
    `partial_gradient` is summed over the tensor-parallel group first. Frozen parameters have no gradient.

    Args:
        tensors: (chunk index, that chunk's tensors).
        data, tensor: the groups.
        bucket_bytes: a bucket is closed when it holds at least this much.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[int, list[ShardedTensor]]],
        data: Group,
        tensor: Group,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._data, self._tensor = data, tensor
        self._buckets: dict[int, list[_Bucket]] = {}
        self._next: dict[int, int] = {}
        self._armed: set[int] = set()
        for chunk, entries in tensors:
            trained = [e for e in reversed(entries) if e.is_parameter and e.tensor.requires_grad]
            whole = [e.tensor for e in trained if not e.shard.partial_gradient]
            partial = [e.tensor for e in trained if e.shard.partial_gradient]
            buckets = [_Bucket(group, False) for group in _packed(whole, bucket_bytes)]
            # Partial gradients are a handful of scalars: they come last, in a bucket of their own.
            buckets += [_Bucket(partial, True)] if partial else []
            self._buckets[chunk] = buckets
            for index, bucket in enumerate(buckets):
                for parameter in bucket.parameters:
                    parameter.register_post_accumulate_grad_hook(self._hook(chunk, index))
        self.zero()

    def zero(self) -> None:
        """Before each step: gradients to zero, in place."""
        for chunk, buckets in self._buckets.items():
            self._next[chunk] = 0
            for bucket in buckets:
                bucket.flat.zero_()
                bucket.attach()
                bucket.waiting = {id(parameter) for parameter in bucket.parameters}
        self._armed.clear()

    def arm(self, chunk: int) -> None:
        """The coming backward of this chunk is the step's last one: what it completes can be reduced."""
        self._armed.add(chunk)

    def _hook(self, chunk: int, index: int):
        def completed(parameter: Tensor) -> None:
            if chunk in self._armed:
                self._buckets[chunk][index].waiting.discard(id(parameter))
                self._reduce_complete(chunk)

        return completed

    def _reduce_complete(self, chunk: int) -> None:
        buckets = self._buckets[chunk]
        while self._next[chunk] < len(buckets) and not buckets[self._next[chunk]].waiting:
            self._reduce(buckets[self._next[chunk]])
            self._next[chunk] += 1

    def _reduce(self, bucket: _Bucket) -> None:
        if bucket.partial:
            all_reduce_sum(bucket.flat, self._tensor, "backward")
        if self._data.size > 1:
            statistics.record(self._data.name, "all_reduce", "backward", bucket.flat.nbytes)
            bucket.work = dist.all_reduce(bucket.flat, group=self._data.handle, async_op=True)

    def finish(self, chunk: int) -> None:
        """Reduces what is left (parameters that took no part in backward keep a zero gradient) and waits for all."""
        buckets = self._buckets[chunk]
        for bucket in buckets[self._next[chunk] :]:
            self._reduce(bucket)
        self._next[chunk] = len(buckets)
        for bucket in buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None


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
