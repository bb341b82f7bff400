"""Gradients of a rank's parameters in contiguous buckets, summed over the data-parallel replicas during backward.

Gradients are sums already (each micro-batch's loss is divided by the global batch size), so that the reduction is a
sum too and uneven shares need no weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from weakref import WeakMethod

from torch import Tensor

from megasnn.parallel.bucket_sizes import EXCHANGES_AT_ONCE, bucket_spans, peak_exchange_bytes
from megasnn.parallel.collectives import all_reduce_sum, start_all_reduce_sum
from megasnn.parallel.fsdp import GatheredWeights
from megasnn.parallel.sharding import ShardedTensor
from megasnn.parallel.zero import ParameterShards, aligned, side_by_side
from megasnn.parallel_state import Group


class Bucket:
    """Some parameters' gradients side by side in one piece of memory; `param.grad` are views of it.

    One that is scattered has memory only while a backward adds to it: then gradients go to those who keep the rows.
    Where backwards are split, the weights of convolutions and linear layers get their gradients in the second part, and
    have late buckets of their own. All other parameters get them in the first: few bytes.

    Args:
        partial: True where they are summed over the tensor parallel group, too.
        owners: ranks that own rows, of those that hold the same of the weights; None where rows have no owners.
        weights: where parameters are kept by rows.

    Attributes:
        pending: how many gradients are still to be added to each parameter that is not complete.
        await_sum: waits for the sum over the replicas; None where none is on its way.
        shard: the rows that this rank keeps, with `--weight-parallel-size`; None otherwise.
        reduced: the gradients of this rank, and then the sum over the ranks.
        owned: the rows that this rank owns; None where every replica is to have the whole sum.
        param_shards: by parameter, and by what is kept of it, the rows that this rank owns, with the reduced gradient.
    """

    def __init__(
        self,
        parameters: list[Tensor],
        partial: bool,
        owners: Group | None,
        weights: GatheredWeights | None,
        scattered: bool,
    ) -> None:
        self.parameters, self.partial = parameters, partial
        # A product of matrices may sum in another order at another alignment, and neighbours depend on the layout.
        sizes = [aligned(each.nbytes) // each.itemsize for each in parameters]
        self.flat = parameters[0].new_zeros(sum(sizes))
        self.views = side_by_side(parameters, self.flat, sizes)
        self.pending: dict[Tensor, int] = {}
        self.await_sum: Callable[[], object] | None = None
        self.shard, self.reduced, self.is_late = None, self.flat, False
        local, gradients = parameters, self.views
        if weights is not None:
            shards = [weights.shards[each] for each in parameters]
            self.shard = ParameterShards(parameters, self.views, weights.scatter, shards)
            local, gradients, self.reduced = [*shards], self.shard.sums, self.shard.sum
            self.is_late = scattered and parameters[0] in weights.multiplied
        self.owned = None if owners is None else ParameterShards(local, gradients, owners)
        self.shards_of_rank = [shards for shards in (self.shard, self.owned) if shards is not None]
        last = self.shards_of_rank[-1].shards if self.shards_of_rank else []
        self.param_shards: dict[Tensor, Tensor] = dict(zip([*parameters, *local], [*last, *last], strict=False))
        if scattered:
            self.free()
        # A module of one's own may use such a weight by itself: then autograd adds to it in the first part.
        begin = _weak(self.begin)
        for parameter in parameters if self.is_late else ():
            parameter.register_hook(lambda _: begin())

    def zero(self) -> None:
        """Clears the gradients before a step."""
        if self.flat.untyped_storage().nbytes():
            self.flat.zero_()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view
        for shards in self.shards_of_rank:
            shards.zero()

    def begin(self) -> None:
        """Makes memory of zeros, where there is none."""
        storage = self.flat.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.flat.nbytes)
            self.flat.zero_()

    def free(self) -> None:
        self.flat.untyped_storage().resize_(0)

    def end(self) -> None:
        """Waits for the sum over the replicas, where one is on its way."""
        if self.await_sum is not None:
            self.await_sum()
            self.await_sum = None  # it holds what has been sent and received


class GradientBuckets:
    """Gradient storage and reduction for the segments of one rank.

    Buckets are filled from the last parameter to the first, the order in which backward finishes them, and are reduced
    in one order on every replica, from the last segment to the first, each as soon as it and all before it are
    complete: replicas with other numbers of micro-batches finish their segments in another order, and their collectives
    must still meet. A parameter is complete when all gradients of the step's micro-batches were added to it. One with
    `partial_gradient` is summed over the tensor-parallel group first. Frozen parameters have no gradient.

    Where rows have owners, a replica gets the sums of its own rows only; what the gradients of parameters hold then is
    the replica's own part. Where weights are kept by rows, gradients go to those who keep the rows first, and are then
    reduced over the ranks that keep the same.

    Args:
        tensors: by the index of the segment whose REDUCE_GRAD ends them.
        holders: the ranks that hold the same of the weights. tp: those that sum partial gradients first.
        additions: how many gradients a micro-batch adds to a parameter, where that is not one.
        shards_have_owners: True for ZeRO-1.
        weights: where parameters are kept by rows.
        scattered: True where gradients go to those who keep the rows at each `scatter`, rather than when they are
            complete.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[int, list[ShardedTensor]]],
        holders: Group,
        tp: Group,
        additions: Mapping[Tensor, int] | None = None,
        shards_have_owners: bool = False,
        weights: GatheredWeights | None = None,
        scattered: bool = False,
    ) -> None:
        owners = holders if shards_have_owners and holders.size > 1 else None
        self._holders, self._tp, self._additions = holders, tp, additions or {}
        self._next, self._of = 0, dict[int, list[Bucket]]()
        self._is_scattered, self._on_their_way = scattered, deque[Bucket]()
        late = weights.multiplied if weights is not None and scattered else set[Tensor]()
        for segment, entries in sorted(tensors, key=lambda pair: -pair[0]):
            trained = [e for e in reversed(entries) if e.is_parameter and e.tensor.requires_grad]
            partial = [e.tensor for e in trained if e.shard.partial_gradient]  # a handful of scalars
            complete = [e.tensor for e in trained if not e.shard.partial_gradient]
            kinds = [t for t in complete if t not in late], [t for t in complete if t in late], partial
            groups = [(group, kind is partial) for kind in kinds for group in _packed(kind)]
            self._of[segment] = [Bucket(*group, owners, weights, scattered) for group in groups]
        self._buckets = list(chain(*self._of.values()))
        self._shards = {parameter: shards for each in self._buckets for parameter, shards in each.param_shards.items()}
        self._bucket_of = {parameter: each for each in self._buckets for parameter in each.parameters}
        # A parameter keeps its hooks, and Python finds no circle through a tensor: with a hook that kept this object,
        # neither it nor weights and gradients would ever be freed.
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(_weak(self.accumulated))
        self.zero()

    def zero(self, micro_batches: int = 1) -> None:
        """Sets gradients to zero, in place, before a step of so many micro-batches."""
        self._next = 0
        for bucket in self._buckets:
            bucket.zero()
            bucket.pending = {each: micro_batches * self._additions.get(each, 1) for each in bucket.parameters}

    def accumulated(self, parameter: Tensor) -> None:
        """Notes that a gradient was added; autograd's hooks call it, and whoever adds otherwise.

        Raises:
            ValueError: more were added than the dry run has shown.
        """
        if self._is_scattered:
            return
        pending = self._bucket_of[parameter].pending
        if parameter not in pending:
            raise ValueError(
                f"a layer with a weight of shape {list(parameter.shape)} was called more often than in the dry run, or "
                "its weight is used by the module around it as well: let every forward call the layer as often, and "
                "use its weight by calling it alone"
            )
        pending[parameter] -= 1
        if pending[parameter] == 0:
            del pending[parameter]
            self._reduce_complete()

    def begin(self, segment: int, first_part: bool = False) -> None:
        """Prepares for a backward of the segment, or the first part of one, whose gradients are scattered."""
        for bucket in self._of.get(segment, ()):
            if not (first_part and bucket.is_late):
                bucket.begin()

    def scatter(self, segment: int) -> None:
        """Starts sending the gradients that backwards have left for the segment to those who keep the rows, and add
        them up in rank order. Collective over them."""
        for bucket in self._of.get(segment, ()):
            self._reduce(bucket, bucket.shard)
            bucket.free()

    def reduce(self, segment: int) -> None:
        """Reduces the segment's gradients; a parameter that took no part in backward keeps a zero gradient."""
        if self._is_scattered:
            return
        for bucket in self._of.get(segment, ()):
            bucket.pending.clear()
        self._reduce_complete()

    def wait(self) -> None:
        """Waits until everything that could be reduced is."""
        self._on_their_way.clear()
        for bucket in self._buckets:
            bucket.end()
            if bucket.partial and self._is_scattered:
                all_reduce_sum(bucket.reduced, self._tp)
            if bucket.shard is not None:
                self._reduce(bucket, bucket.owned)
        for bucket in self._buckets:
            bucket.end()

    def owned(self, entry: ShardedTensor) -> ShardedTensor:
        """Part of a tensor that this rank owns, with a gradient of its own: all of it where its rows have no owners."""
        shards = self._shards.get(entry.tensor)
        if shards is None or shards is entry.tensor:
            return entry
        return replace(entry, tensor=shards, shard=entry.shard.by_rows("dp_replicate").by_rows("cp"))

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """The reduced gradient of a parameter, or of those of its rows that this rank owns."""
        return self._shards.get(parameter, parameter).grad

    def all_gather_params(self) -> None:
        """Gives the rows that owners have changed to all replicas. Collective over the replicas; does nothing where
        rows have no owners."""
        for bucket in self._buckets:
            if bucket.owned is not None:
                bucket.owned.start_all_gather()()  # one at a time, which bounds the memory

    @property
    def resident_bytes(self) -> int:
        """Bytes of gradients and of the sums of rows, at most: of what the second parts of backwards add and is then
        scattered, those of the two largest segments."""
        late = [sum(each.flat.nbytes * each.is_late for each in buckets) for buckets in self._of.values()]
        sums = sum(shards.sum.nbytes for each in self._buckets for shards in each.shards_of_rank)
        return sums + sum(each.flat.nbytes for each in self._buckets) - sum(sorted(late)[:-2])

    @property
    def exchanged_bytes(self) -> int:
        """Peak bytes of the exchanges with the owners or keepers of rows."""
        return peak_exchange_bytes(shards.exchange_bytes for each in self._buckets for shards in each.shards_of_rank)

    def _reduce_complete(self) -> None:
        while self._next < len(self._buckets) and not self._buckets[self._next].pending:
            bucket = self._buckets[self._next]
            self._next += 1
            if bucket.partial:
                all_reduce_sum(bucket.flat, self._tp)
            # What is kept by rows goes over the data axis when all of these are done, in one order on all ranks.
            self._reduce(bucket, bucket.shard or bucket.owned)

    def _reduce(self, bucket: Bucket, shards: ParameterShards | None) -> None:
        """Starts sending gradients to those who keep or own the rows, two at a time, which bounds the memory; or
        summing them over the replicas."""
        if shards is not None:
            bucket.end()
            if len(self._on_their_way) == EXCHANGES_AT_ONCE:
                self._on_their_way.popleft().end()
            bucket.await_sum = shards.start_sum()
            self._on_their_way.append(bucket)
        elif self._holders.size > 1 and bucket.reduced.numel():
            bucket.await_sum = start_all_reduce_sum(bucket.reduced, self._holders)


def _weak(method: Callable[..., None]) -> Callable[..., None]:
    """Calls a method, and nothing when its object is gone."""
    reference = WeakMethod(method)
    return lambda *arguments: None if (call := reference()) is None else call(*arguments)


def _packed(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Parameters of each bucket: of one type, and of a size that suits the device."""
    on_gpu = bool(parameters) and parameters[0].device.type != "cpu"
    spans = bucket_spans([(each.nbytes, each.dtype) for each in parameters], on_gpu)
    return [parameters[span.start : span.stop] for span in spans]
