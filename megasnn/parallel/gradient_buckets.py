"""Gradients of a rank's parameters in contiguous buckets, summed over the data-parallel replicas during backward.

Gradients are sums already (each micro-batch's loss is divided by the global batch size), so that the reduction is a
sum too and uneven shares need no weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from weakref import WeakMethod

from torch import Tensor

from megasnn.parallel.collectives import all_reduce_sum, exchange_bytes, start_all_reduce_sum
from megasnn.parallel.fsdp import ALIGNMENT, GatheredWeights
from megasnn.parallel.group import Group
from megasnn.parallel.sharded_tensors import ShardedTensor
from megasnn.parallel.zero import RowShards

BUCKET_BYTES = 8 * 1024 * 1024  # on a CPU


def _never() -> bool:
    return False


class Bucket:
    """Some parameters' gradients side by side in one tensor; `param.grad` are views of it.

    Args:
        parts: the parameters; those of each part lie in one piece of memory.
        partial: whether they are summed over the tensor parallel group, too.
        owners: the replicas that own rows, of those that hold the same of the weights; None where rows have no owners.
        weights: where parameters are kept by rows.

    Attributes:
        flats: the memory of each part.
        due: how many gradients are still to be added to each parameter that is not complete.
        finish: waits for the sum over the replicas; None where none is on its way.
        is_complete: whether that would end at once.
        kept: the rows that this rank keeps, where it keeps no others. sum: of this rank's gradients, and then of those
            of all ranks that it is reduced over.
        owned: the rows that this rank owns; None where every replica is to have the whole sum.
    """

    def __init__(
        self,
        chunk: int,
        parts: Sequence[list[Tensor]],
        partial: bool,
        owners: Group | None,
        weights: GatheredWeights | None,
    ) -> None:
        self.chunk, self.parameters, self.partial = chunk, [*chain(*parts)], partial
        placed = [_side_by_side(part) for part in parts]
        self.flats = [flat for flat, _ in placed]
        self.views = [view for _, views in placed for view in views]
        self.due: dict[Tensor, int] = {}
        self.finish: Callable[[], object] | None = None
        self.is_complete: Callable[[], bool] = _never
        self.kept, self.sum = None, self.flats[0]
        held, gradients = self.parameters, self.views
        if weights is not None:
            rows = [weights.rows(each) for each in self.parameters]
            self.kept = RowShards(self.parameters, self.views, weights.scatter, rows)
            held, gradients, self.sum = [*rows], self.kept.sums, self.kept.sum
        self.owned = None if owners is None else RowShards(held, gradients, owners)

    def zero(self) -> None:
        """Before each step."""
        for flat in self.flats:
            flat.zero_()
        self.attach()

    def end(self) -> None:
        """Waits for the sum over the replicas, where one is on its way."""
        if self.finish is not None:
            self.finish()
            self.finish, self.is_complete = None, _never  # which hold what has been sent and received

    def attach(self) -> None:
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view
        for rows in (self.kept, self.owned):
            if rows is not None:
                rows.attach()

    def final(self) -> dict[Tensor, Tensor]:
        """By parameter, and by what is kept of it, the rows that this rank owns, with the reduced gradient."""
        owned = self.owned or self.kept
        if owned is None:
            return {}
        final: dict[Tensor, Tensor] = dict(zip(self.parameters, owned.rows, strict=True))
        if self.kept is not None:
            final.update(zip(self.kept.rows, owned.rows, strict=True))
        return final


class ScatteredBucket(Bucket):
    """A bucket that there is memory for while a backward adds to it: behind it, gradients go to those who keep the
    rows, and are added up there.

    Where backwards are split, the weights of convolutions and linear layers get their gradients in the second part. All
    other parameters get them in the first, and are a part of the bucket, which has memory from then on: few bytes.

    Attributes:
        early_bytes, late_bytes: of the gradients that the first and the second part of a backward give.
    """

    def __init__(
        self, chunk: int, parameters: list[Tensor], partial: bool, owners: Group | None, weights: GatheredWeights
    ) -> None:
        early = [each for each in parameters if each not in weights.multiplied]
        late = [each for each in parameters if each in weights.multiplied]
        super().__init__(chunk, [part for part in (early, late) if part], partial, owners, weights)
        self._early = self.flats[: 1 if early else 0]
        self.early_bytes = sum(flat.nbytes for flat in self._early)
        self.late_bytes = sum(flat.nbytes for flat in self.flats) - self.early_bytes
        for flat in self.flats:
            flat.untyped_storage().resize_(0)
        # A module of one's own may use such a weight by itself: then autograd adds to it in the first part.
        begin = WeakMethod(self.begin)

        def before_adding(_: Tensor) -> None:
            if (begin_here := begin()) is not None:
                begin_here()

        for parameter in late:
            parameter.register_hook(before_adding)

    def zero(self) -> None:
        self.sum.zero_()
        self.attach()

    def begin(self, first_part: bool = False) -> None:
        """Before a backward adds to it, or only its first part: zeros, where there is nothing that is not scattered."""
        for flat in self._early if first_part else self.flats:
            storage = flat.untyped_storage()
            if not storage.nbytes():
                storage.resize_(flat.nbytes)
                flat.zero_()

    def scatter(self) -> None:
        """Starts sending what there is to those who keep the rows. Collective over them."""
        assert self.kept is not None
        self.end()
        self.finish = self.kept.start_adding("backward")
        for flat in self.flats:
            flat.untyped_storage().resize_(0)


def _side_by_side(parameters: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Zeros, and the place of each parameter in them, in its memory order, as the optimizer wants it.

    A product of matrices may sum in another order at another alignment, and a parameter's neighbours depend on the
    layout: each begins at a multiple of ALIGNMENT.
    """
    steps = [ALIGNMENT // each.itemsize for each in parameters]
    sizes = [-(-each.numel() // step) * step for each, step in zip(parameters, steps, strict=True)]
    flat = parameters[0].new_zeros(sum(sizes))
    starts = accumulate(sizes, initial=0)
    views = [flat.as_strided(each.shape, each.stride(), start) for each, start in zip(parameters, starts, strict=False)]
    return flat, views


class GradientBuckets:
    """Gradient storage and reduction for the chunks of one rank, in every combination with TP and PP.

    Buckets are filled from the last parameter to the first, the order in which backward finishes them, and are reduced
    in one order on every replica, from the last chunk to the first, each as soon as it and all before it are complete:
    replicas with other numbers of micro-batches finish their chunks in another order, and their collectives must still
    meet. A parameter is complete when all gradients of the step's micro-batches were added to it. One with
    `partial_gradient` is summed over the tensor-parallel group first. Frozen parameters have no gradient.

    Where rows have owners, a replica gets the sums of its own rows only; what the gradients of parameters hold behind
    that is the replica's own part. Where weights are kept by rows, gradients go to those who keep the rows first, and
    are then reduced over the ranks that keep the same.

    Args:
        tensors: (chunk index, that chunk's tensors).
        data, tensor: the groups. Of the replicas and of ranks that share a micro-batch, those that hold the same of the
            weights.
        bucket_bytes: a bucket is closed when it holds at least this much; None for what suits the device.
        additions: how many gradients a micro-batch adds to a parameter, where that is not one.
        rows_have_owners: whether each row of a parameter belongs to one of the replicas.
        weights: where parameters are kept by rows.
        scattered: whether gradients go to those who keep the rows whenever `scatter` is called, rather than when they
            are complete.

    Attributes:
        without_gradient: the parameters to which no backward has added anything yet, in any step.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[int, list[ShardedTensor]]],
        data: Group,
        tensor: Group,
        bucket_bytes: int | None = None,
        additions: Mapping[Tensor, int] | None = None,
        rows_have_owners: bool = False,
        weights: GatheredWeights | None = None,
        scattered: bool = False,
    ) -> None:
        owners = data if rows_have_owners and data.size > 1 else None
        self._data, self._tensor, self._additions = data, tensor, additions or {}
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[Tensor, Bucket] = {}
        self._next = 0
        self._scattered: dict[int, list[ScatteredBucket]] = {}
        self._on_their_way = deque[ScatteredBucket]()

        def bucket(chunk: int, parameters: list[Tensor], partial: bool) -> Bucket:
            if weights is None or not scattered:
                return Bucket(chunk, [parameters], partial, owners, weights)
            made = ScatteredBucket(chunk, parameters, partial, owners, weights)
            self._scattered.setdefault(chunk, []).append(made)
            return made

        trained_of = {
            chunk: [e for e in reversed(entries) if e.is_parameter and e.tensor.requires_grad]
            for chunk, entries in sorted(tensors, key=lambda pair: -pair[0])
        }
        for chunk, trained in trained_of.items():
            whole = [e.tensor for e in trained if "tensor" not in e.shard.partial_gradient]
            partial = [e.tensor for e in trained if "tensor" in e.shard.partial_gradient]
            if whole:
                over = data if weights is None else weights.scatter
                most = bucket_bytes or exchange_bytes(over, whole[0].device, BUCKET_BYTES)
                self._buckets += [bucket(chunk, group, False) for group in _packed(whole, most)]
            # Partial gradients are a handful of scalars: they come last, in a bucket of their own.
            self._buckets += [bucket(chunk, partial, True)] if partial else []
        self._rows = {parameter: rows for each in self._buckets for parameter, rows in each.final().items()}
        # A parameter keeps its hooks, and Python finds no circle through a tensor: with a hook that kept this object,
        # neither it nor weights and gradients would ever be freed.
        accumulated = WeakMethod(self.accumulated)

        def count(parameter: Tensor) -> None:
            if (count_here := accumulated()) is not None:
                count_here(parameter)

        for each in self._buckets:
            for parameter in each.parameters:
                self._bucket_of[parameter] = each
                parameter.register_post_accumulate_grad_hook(count)
        self.without_gradient = set(self._bucket_of)
        self.zero()

    def zero(self, micro_batches: int = 1) -> None:
        """Before each step of so many micro-batches: gradients to zero, in place."""
        self._next = 0
        for bucket in self._buckets:
            bucket.zero()
            bucket.due = {each: micro_batches * self._additions.get(each, 1) for each in bucket.parameters}

    def accumulated(self, parameter: Tensor) -> None:
        """To be called when a gradient was added other than by autograd, whose hooks call it too.

        Raises:
            ValueError: more were added than the dry run has shown.
        """
        self.without_gradient.discard(parameter)
        if self._scattered:
            return
        due = self._bucket_of[parameter].due
        if parameter not in due:
            raise ValueError(
                f"a layer with a weight of shape {list(parameter.shape)} was called more often than in the dry run, or "
                "its weight is used by the module around it as well: let every forward call the layer as often, and "
                "use its weight by calling it alone"
            )
        due[parameter] -= 1
        if due[parameter] == 0:
            del due[parameter]
            self._reduce_complete()

    def begin(self, chunk: int, first_part: bool = False) -> None:
        """A backward of the chunk, or the first part of one, is about to add gradients, which are to be scattered."""
        for bucket in self._scattered.get(chunk, ()):
            bucket.begin(first_part)

    def scatter(self, chunk: int) -> None:
        """Starts sending the gradients that backwards have left for the chunk to those who keep the rows, and add them
        up in rank order. Collective over them."""
        for bucket in self._scattered.get(chunk, ()):
            if len(self._on_their_way) > 1:  # two at a time, which bounds the memory
                self._on_their_way.popleft().end()
            bucket.scatter()
            self._on_their_way.append(bucket)

    def finish(self, chunk: int) -> None:
        """The chunk's gradients are done; a parameter that took no part in backward keeps a zero gradient."""
        if self._scattered:
            return
        for bucket in self._buckets:
            if bucket.chunk == chunk:
                bucket.due.clear()
        self._reduce_complete()

    def wait(self) -> None:
        """Until everything that could be reduced is."""
        self._on_their_way.clear()
        for bucket in self._buckets:
            bucket.end()
            if bucket.partial and self._scattered:
                all_reduce_sum(bucket.sum, self._tensor, "backward")
            if bucket.kept is not None:
                self._reduce_over_data(bucket)
        for bucket in self._buckets:
            bucket.end()

    def owned(self, entry: ShardedTensor) -> ShardedTensor:
        """What this rank owns of a tensor, with a gradient of its own: all of it where its rows have no owners.

        Raises:
            ValueError: the tensor's description does not know of the ranks that own other rows.
        """
        rows = self._rows.get(entry.tensor)
        if rows is None or rows is entry.tensor:
            return entry
        shard = entry.shard.by_rows("data").by_rows("context")
        if shard.local_shape != rows.shape:
            raise ValueError(
                f"{entry.name} was described without the {self._data.size} ranks that own rows of it: "
                "BuildContext(data=..., context=...)"
            )
        return replace(entry, tensor=rows, shard=shard)

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """The reduced gradient of a parameter, or of those of its rows that this rank owns."""
        return self._rows.get(parameter, parameter).grad

    @property
    def held_bytes(self) -> int:
        """Of gradients and of the sums of rows, at most: of what is scattered, those of the two largest chunks, and of
        all others what the first parts of backwards have added."""
        sums = sum(rows.sum.nbytes for each in self._buckets for rows in (each.kept, each.owned) if rows is not None)
        if not self._scattered:
            return sums + sum(flat.nbytes for each in self._buckets for flat in each.flats)
        scattered = self._scattered.values()
        early = sum(each.early_bytes for buckets in scattered for each in buckets)
        late = [sum(each.late_bytes for each in buckets) for buckets in scattered]
        return sums + early + sum(sorted(late)[-2:])

    @property
    def exchanged_bytes(self) -> int:
        """What exchanges with those who own or keep rows take at most, behind all backwards or behind the step: the end
        of one, while the next is on its way."""
        rows = [each for bucket in self._buckets for each in (bucket.kept, bucket.owned) if each is not None]
        travelling = [each.travelling_bytes for each in rows]
        nexts = [*travelling[1:], 0]
        return max(
            (now + each.arrived_bytes + later for each, now, later in zip(rows, travelling, nexts, strict=False)),
            default=0,
        )

    @property
    def travelling(self) -> list[tuple[list[Tensor], int]]:
        """Where rows of whole parameters have owners: of each bucket, in the order in which they are complete, the
        parameters, and the bytes that travel as soon as they are."""
        return [
            (each.parameters, each.owned.travelling_bytes)
            for each in self._buckets
            if each.owned is not None and each.kept is None
        ]

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

    def _reduce(self, bucket: Bucket) -> None:
        if bucket.partial:
            all_reduce_sum(bucket.flats[0], self._tensor, "backward")
        if bucket.kept is not None:  # over the data axis when all of these are done, in one order on all ranks
            self._scatter(bucket, bucket.kept)
        else:
            self._reduce_over_data(bucket)

    def _reduce_over_data(self, bucket: Bucket) -> None:
        if bucket.owned is not None:
            self._scatter(bucket, bucket.owned)
        elif self._data.size > 1 and bucket.sum.numel():
            bucket.finish = start_all_reduce_sum(bucket.sum, self._data, "backward")

    def _scatter(self, bucket: Bucket, to: RowShards) -> None:
        self._finish_complete()
        exchange, bucket.finish = to.start_sum("backward")
        bucket.is_complete = lambda: exchange.is_complete

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
