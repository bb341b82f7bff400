"""Gradients in contiguous buckets, summed over data parallel replicas during backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from weakref import WeakMethod, finalize

import torch
from torch import Tensor

from megasnn.parallel.bucket_sizes import EXCHANGES_AT_ONCE, bucket_spans, peak_exchange_bytes
from megasnn.parallel.collectives import all_reduce_sum, start_all_reduce_sum
from megasnn.parallel.fsdp import GatheredWeights
from megasnn.parallel.pending_gradients import PendingGradients
from megasnn.parallel.sharding import ShardedTensor
from megasnn.parallel.zero import ParameterShards, aligned, side_by_side
from megasnn.parallel_state import Group


class Bucket:
    """Gradients in one storage, viewed by `parameter.grad`. Scattered ones have memory in backward only.

    Args:
        is_partial: also sum over the tensor parallel group.
        zero1_group: ranks dividing the optimizer state (ZeRO-1); None without.

    Attributes:
        pending: counts the gradients; None for scattered ones.
        is_late: filled by the second part of split backwards: `GatheredWeights.multiplied`.
        await_sum: waits for the replicas' sum in flight.
        fsdp_shards: the shards of this rank in FSDP; None without.
        zero1_shards: the shards of this rank in ZeRO-1; None without.
        local_parts: this rank's part of each parameter: its FSDP shard, or the whole parameter.
        reduced: gradients of the local parts; without ZeRO-1 the replicas' sum replaces them.
        reduced_parts: the tensor that gets each parameter's reduced gradient: its ZeRO-1 shard, or the local part.
    """

    def __init__(
        self,
        parameters: list[Tensor],
        is_partial: bool,
        zero1_group: Group | None,
        weights: GatheredWeights | None,
        scattered: bool,
    ) -> None:
        self.parameters = parameters
        self.is_partial = is_partial
        # Aligned: a matrix product may sum in another order at another alignment, and neighbours depend on the layout.
        sizes = [aligned(each.nbytes) // each.itemsize for each in parameters]
        self.flat = parameters[0].new_zeros(sum(sizes))
        self.views = side_by_side(parameters, self.flat, sizes)
        self.pending: PendingGradients | None = None
        self.await_sum: Callable[[], object] | None = None
        self.fsdp_shards: ParameterShards | None = None
        self.zero1_shards: ParameterShards | None = None
        self.reduced = self.flat
        self.is_late = False
        self.local_parts: list[Tensor] = parameters
        gradients = self.views
        if weights is not None:
            shards = [weights.shards[each] for each in parameters]
            self.fsdp_shards = ParameterShards(parameters, self.views, weights.scatter, shards)
            self.reduced = self.fsdp_shards.sum
            self.is_late = scattered and parameters[0] in weights.multiplied
            self.local_parts = list(shards)
            gradients = self.fsdp_shards.sums
        # Shards of FSDP are divided once more, among the ranks with the same shards.
        if zero1_group is not None:
            self.zero1_shards = ParameterShards(self.local_parts, gradients, zero1_group)
        self.shards_of_rank = [shards for shards in (self.fsdp_shards, self.zero1_shards) if shards is not None]
        self.reduced_parts: list[Tensor] = self.local_parts
        if self.zero1_shards is not None:
            self.reduced_parts = list(self.zero1_shards.shards)
        if scattered:
            self.free()
        if self.is_late:
            # A user's module may use such a weight directly. Autograd then adds to it in the first part.
            begin = _weak(self.begin)
            for parameter in parameters:
                parameter.register_hook(lambda _: begin())

    def attach(self) -> list[Tensor]:
        """Makes the gradients views of the bucket again, after a user's `zero_grad`. Returns the tensors to zero."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view
        resident = [self.flat] if self.flat.untyped_storage().nbytes() else []
        for shards in self.shards_of_rank:
            shards.attach()
            resident.append(shards.sum)
        return resident

    def begin(self) -> None:
        """Allocates zeroed memory if there is none."""
        storage = self.flat.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.flat.nbytes)
            self.flat.zero_()

    def free(self) -> None:
        self.flat.untyped_storage().resize_(0)

    def end(self) -> None:
        """Waits for a sum that was started."""
        if self.await_sum is not None:
            self.await_sum()
            # It references the sent and received tensors.
            self.await_sum = None


class GradientBuckets:
    """One rank's gradient storage and reduction.

    With ZeRO-1, a rank gets the sums of its own shards alone, and `parameter.grad` stays local. With FSDP, gradients go
    to the shards' owners, then over the replicas.

    Args:
        tensors: by the segment whose REDUCE_GRAD reduces them.
        holders: ranks with identical weight shards.
        tp: ranks summing partial gradients.
        additions: a parameter's gradients in one micro-batch, if not one.
        zero1: `holders` divide the optimizer state.
        scattered: send gradients at each `scatter`, not when complete.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[int, list[ShardedTensor]]],
        holders: Group,
        tp: Group,
        additions: Mapping[Tensor, int] | None = None,
        zero1: bool = False,
        weights: GatheredWeights | None = None,
        scattered: bool = False,
    ) -> None:
        self._holders = holders
        self._tp = tp
        self._is_scattered = scattered
        self._in_flight: deque[Bucket] = deque()
        self._next = 0  # the first bucket whose reduction has not started in this step
        self._by_segment: dict[int, list[Bucket]] = {}
        self._buckets: list[Bucket] = []
        # Last to first, the order of backward, on every replica: replicas with unequal numbers of micro-batches finish
        # segments in different orders, and their collectives must match.
        zero1_group = holders if zero1 and holders.size > 1 else None
        late = weights.multiplied if weights is not None and scattered else set[Tensor]()
        for segment, entries in sorted(tensors, key=lambda pair: -pair[0]):
            buckets = []
            for parameters, is_partial in _groups(entries, late):
                buckets.append(Bucket(parameters, is_partial, zero1_group, weights, scattered))
            self._by_segment[segment] = buckets
            self._buckets += buckets
        # Parameters and this rank's parts of them -> their summed gradients, which the optimizer reads.
        self._reduced_of_parameter: dict[Tensor, Tensor] = {}
        self._reduced_of_part: dict[Tensor, Tensor] = {}
        self._counters: dict[Tensor, Callable[[Tensor], None]] = {}
        for bucket in self._buckets:
            self._reduced_of_parameter.update(zip(bucket.parameters, bucket.reduced_parts, strict=True))
            self._reduced_of_part.update(zip(bucket.local_parts, bucket.reduced_parts, strict=True))
            if not scattered:
                self._count_gradients(bucket, additions or {})
        self.zero()

    def zero(self, micro_batches: int = 1) -> None:
        """In place, before a step with `micro_batches`."""
        self._next = 0
        resident: list[Tensor] = []
        for bucket in self._buckets:
            resident += bucket.attach()
            if bucket.pending is not None:
                bucket.pending.begin(micro_batches)
        # Tensors of one type are zeroed by one launch.
        if resident:
            torch._foreach_zero_(resident)

    def _count_gradients(self, bucket: Bucket, additions: Mapping[Tensor, int]) -> None:
        expected = [additions.get(parameter, 1) for parameter in bucket.parameters]
        bucket.pending = PendingGradients(expected, _weak(self._reduce_complete))
        for index, parameter in enumerate(bucket.parameters):
            count = partial(bucket.pending.count, index)
            self._counters[parameter] = count
            # A parameter may outlive its buckets.
            finalize(self, parameter.register_post_accumulate_grad_hook(count).remove)

    def accumulated(self, parameter: Tensor) -> None:
        """Counts a gradient that was added without autograd. Raises ValueError for an unexpected one."""
        if not self._is_scattered:
            # The bucket's last gradient starts its sum: PendingGradients.count calls _reduce_complete.
            self._counters[parameter](parameter)

    def begin(self, segment: int, first_part: bool = False) -> None:
        """Allocates scattered gradients before a segment's backward or its first part."""
        for bucket in self._by_segment.get(segment, ()):
            if not (first_part and bucket.is_late):
                bucket.begin()

    def scatter(self, segment: int) -> None:
        """Starts sending gradients to the shards' owners. Collective."""
        for bucket in self._by_segment.get(segment, ()):
            self._start_reduce(bucket, bucket.fsdp_shards)
            bucket.free()

    def reduce(self, segment: int) -> None:
        """Starts the remaining sums: of buckets with a parameter that got no gradient in this step.

        Its gradient counts as zero.
        """
        if self._is_scattered:
            return
        for bucket in self._by_segment.get(segment, ()):
            if bucket.pending is not None and bucket.pending.unfinished:
                bucket.pending.end()
        self._reduce_complete()

    def wait(self) -> None:
        self._in_flight.clear()
        for bucket in self._buckets:
            bucket.end()
            if bucket.is_partial and self._is_scattered:
                all_reduce_sum(bucket.reduced, self._tp)
            # Sums over the replicas follow the sums over FSDP's ranks, in one order on all ranks.
            if bucket.fsdp_shards is not None:
                self._start_reduce(bucket, bucket.zero1_shards)
        for bucket in self._buckets:
            bucket.end()

    def owned_part(self, entry: ShardedTensor) -> ShardedTensor:
        """ZeRO-1's shard of a local part, with its gradient; without ZeRO-1 the local part."""
        shard = self._reduced_of_part.get(entry.tensor, entry.tensor)
        if shard is entry.tensor:
            return entry
        return replace(entry, tensor=shard, shard=entry.shard.by_rows("dp_replicate").by_rows("cp"))

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """A parameter's reduced gradient, on a rank with a shard the shard's."""
        return self._reduced_of_parameter.get(parameter, parameter).grad

    def gradient_of_part(self, part: Tensor) -> Tensor | None:
        """The reduced gradient of a local part."""
        return self._reduced_of_part.get(part, part).grad

    def all_gather_params(self) -> None:
        """Sends owned shards' values to all replicas. Collective."""
        for bucket in self._buckets:
            if bucket.zero1_shards is not None:
                # One at a time bounds the memory.
                finish = bucket.zero1_shards.start_all_gather()
                finish()

    @property
    def resident_bytes(self) -> int:
        """Peak, for gradients and their sums."""
        total = 0
        for bucket in self._buckets:
            total += bucket.flat.nbytes + sum(shards.sum.nbytes for shards in bucket.shards_of_rank)
        late = []
        for buckets in self._by_segment.values():
            late.append(sum(bucket.flat.nbytes for bucket in buckets if bucket.is_late))
        # Late gradients of two segments are live at once.
        return total - sum(sorted(late)[:-2])

    @property
    def exchanged_bytes(self) -> int:
        """Peak, for exchanges with owners."""
        exchanges = []
        for bucket in self._buckets:
            exchanges += [shards.exchange_bytes for shards in bucket.shards_of_rank]
        return peak_exchange_bytes(exchanges)

    def _reduce_complete(self) -> None:
        # A bucket waits for all earlier ones: collectives must match on every replica.
        for bucket in self._buckets[self._next :]:
            if bucket.pending is not None and bucket.pending.unfinished:
                break
            self._next += 1
            if bucket.is_partial:
                all_reduce_sum(bucket.flat, self._tp)
            # Losses are divided by the global batch size: gradients are summed, not averaged.
            self._start_reduce(bucket, bucket.fsdp_shards or bucket.zero1_shards)

    def _start_reduce(self, bucket: Bucket, shards: ParameterShards | None) -> None:
        if shards is not None:
            bucket.end()
            # A bound on the exchanges in flight bounds their memory.
            if len(self._in_flight) == EXCHANGES_AT_ONCE:
                self._in_flight.popleft().end()
            bucket.await_sum = shards.start_sum()
            self._in_flight.append(bucket)
        elif self._holders.size > 1 and bucket.reduced.numel():
            bucket.await_sum = start_all_reduce_sum(bucket.reduced, self._holders)


def _weak(method: Callable[..., None]) -> Callable[..., None]:
    """Calls a method without keeping its object alive; does nothing afterwards."""
    reference = WeakMethod(method)

    def call(*arguments: object) -> None:
        alive = reference()
        if alive is not None:
            alive(*arguments)

    return call


def _groups(entries: list[ShardedTensor], late: set[Tensor]) -> list[tuple[list[Tensor], bool]]:
    """Trained parameters by bucket, last to first, and whether gradients are partial."""
    early_parameters: list[Tensor] = []
    late_parameters: list[Tensor] = []
    partial_parameters: list[Tensor] = []
    for entry in reversed(entries):
        if not (entry.is_parameter and entry.tensor.requires_grad):
            continue
        if entry.shard.partial_gradient:
            partial_parameters.append(entry.tensor)
        elif entry.tensor in late:
            late_parameters.append(entry.tensor)
        else:
            early_parameters.append(entry.tensor)
    complete = _packed(early_parameters) + _packed(late_parameters)
    return [(group, False) for group in complete] + [(group, True) for group in _packed(partial_parameters)]


def _packed(parameters: list[Tensor]) -> list[list[Tensor]]:
    on_gpu = bool(parameters) and parameters[0].device.type != "cpu"
    spans = bucket_spans([(each.nbytes, each.dtype) for each in parameters], on_gpu)
    return [parameters[span.start : span.stop] for span in spans]
