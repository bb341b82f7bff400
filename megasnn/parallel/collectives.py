"""Activations as rows, and the collectives that sharded layers use on them, with an explicit group.

`[T, N, C, *space]` with channels last in memory is the matrix `[T*N*space, C]`. Tensor parallelism cuts its columns, so
that every collective here works on rows; each returns early at size 1.

Sums of columns are formed on the receiving rank in rank order from an all-to-all: the result does not depend on the
algorithm that a backend picks for its size, and on Gloo an all-to-all is several times faster than its reduce-scatter.
Gradients are summed over replicas by the backend's all-reduce, which gives the same bits for the same layout.

Calls and bytes are counted by group, for the whole process. Bytes are those that cross from one rank to another, after
spikes have been packed: of a collective the bytes that this rank receives, of a message its payload, at the sender.
Summed over ranks, every byte is counted once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.common.memory import let_others_go
from megasnn.common.recompute import cached_collective
from megasnn.kernels.layout import empty
from megasnn.kernels.spike_codec import Content, decode_into, encode
from megasnn.parallel_state import Group

_ALL_GATHER_SINGLE = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13
Exchange = Callable[[], list[Tensor]]


def to_matrix(x: Tensor) -> Tensor:
    """[T, N, C, *space] -> [T*N*prod(space), C]; a view when channels are last in memory, otherwise a copy."""
    return x.movedim(2, -1).reshape(-1, x.shape[2]).contiguous()  # of one channel among others, reshape gives a view


def from_matrix(matrix: Tensor, like: tuple[int, ...] | torch.Size) -> Tensor:
    """The inverse, for the shape `like` = (T, N, any C, *space); C is taken from the matrix. Always a view."""
    time, samples, _, *space = like
    return matrix.view(time, samples, *space, matrix.shape[1]).movedim(-1, 2)


def gather_columns(
    rows: Tensor, group: Group, content: Content, bits: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Gathers every rank's columns side by side: [R, C/size] -> [R, C], and the payloads they came in.

    The payloads (one per rank, packed by `content`) are the cheapest exact copy of the result to keep for backward.

    Args:
        bits: the rows, where they are packed already.
    """

    def payload() -> Tensor:
        return encode(rows.reshape(-1), content, check=True) if bits is None else bits

    def gathered() -> list[Tensor]:
        mine = payload()
        others = group.size - 1
        traffic.record(group.name, others * mine.nbytes, others * rows.nbytes)
        return all_gather_into(mine.new_empty(group.size * len(mine)), mine, group)

    if group.size == 1:
        return rows, [payload()]
    payloads = cached_collective(gathered)
    return join_columns(payloads, content, rows.shape, rows.dtype), payloads


def require_dense(tensor: Tensor) -> None:
    """Raises ValueError for a tensor whose values do not lie one behind the other in memory, row by row.

    Gloo exchanges such a tensor in the order of memory, and reports success (findings/gloo_memory_order.sh).
    """
    if not tensor.is_contiguous():
        order = f"shape {list(tensor.shape)}, strides {list(tensor.stride())}"
        raise ValueError(f"an exchange between ranks takes contiguous tensors, and got {order}: give it .contiguous()")


def all_gather_into(into: Tensor, mine: Tensor, group: Group) -> list[Tensor]:
    """Gathers the part of each rank, in rank order; all of them lie in `into`.

    Args:
        into: contiguous, as many values as all ranks have together.
        mine: `[n]`, the same number on every rank.
    """
    require_dense(mine)
    parts = list(into.view(group.size, -1))
    mine = mine.view(-1)
    work: list[dist.Work | None]
    if mine.device.type != "cpu":
        # NCCL fills a list of tensors from one that it makes, by a copy more. Flat: Gloo takes no table from a GPU.
        work = [_ALL_GATHER_SINGLE(into.view(-1), mine, group=group.handle, async_op=True)]
    elif mine.numel() and "gloo" in dist.get_backend(group.handle):
        # Gloo's all-gather hands each step to another thread. Two ranks on two cores: 5 kB in 330 us and 18 MB in 77 ms
        # by it, in 98 us and 30 ms by messages.
        parts[group.rank].copy_(mine)
        others = [(rank, part) for rank, part in enumerate(parts) if rank != group.rank]
        work = [dist.irecv(part, group.ranks[rank], group=group.handle) for rank, part in others]
        work += [dist.isend(mine, group.ranks[rank], group=group.handle) for rank, _ in others]
    else:
        work = [dist.all_gather(parts, mine, group=group.handle, async_op=True)]
    for each in work:
        if each is not None:
            each.wait()
    let_others_go()
    return parts


def join_columns(
    payloads: list[Tensor], content: Content, shape: tuple[int, int] | torch.Size, dtype: torch.dtype
) -> Tensor:
    """Unpacks one payload per rank, each of a [R, C/size] = `shape` matrix, into the columns of one [R, C] tensor."""
    row_count, columns = shape
    if len(payloads) == 1 and content is Content.DENSE:
        return payloads[0].view(row_count, columns).to(dtype)
    width = columns * len(payloads)
    full = empty((row_count, width), dtype, payloads[0].device)
    for index, payload in enumerate(payloads):
        decode_into(payload, content, full[:, index * columns : (index + 1) * columns])
    return full


def sum_and_scatter_columns(rows: Tensor, group: Group) -> Callable[[], Tensor]:
    """Starts summing [R, C] over the ranks; the returned function waits and gives this rank's columns, [R, C/size]."""
    if group.size == 1:
        return lambda: rows
    row_count, columns = rows.shape
    outgoing = rows.view(row_count, group.size, columns // group.size).transpose(0, 1).contiguous()
    incoming = torch.empty_like(outgoing)
    traffic.record(group.name, outgoing.nbytes - outgoing[0].nbytes)
    work = [dist.all_to_all_single(incoming, outgoing, group=group.handle, async_op=True)]

    def finish() -> Tensor:
        work[0].wait()
        let_others_go()
        work.clear()  # it holds what was sent
        return sum_in_rank_order(incoming)

    return finish


def sum_in_rank_order(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """Sums in float32 at least, rounded once."""
    if parts[0].dtype == torch.bfloat16:
        return sum_in_rank_order([part.float() for part in parts]).to(parts[0].dtype)
    total = parts[0].clone() if len(parts) == 1 else parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def all_reduce_sum(tensor: Tensor, group: Group) -> Tensor:
    """Sums over the group, in place."""
    if group.size > 1:
        start_all_reduce_sum(tensor, group)()
    return tensor


def start_all_reduce_sum(tensor: Tensor, group: Group) -> Callable[[], object]:
    """Starts summing over a group of several ranks, in place; the returned function waits until that is done."""
    require_dense(tensor)
    # Counted is the least that a backend does: each rank adds up a part, and gets the others'.
    traffic.record(group.name, 2 * (group.size - 1) * tensor.nbytes // group.size)
    return dist.all_reduce(tensor, group=group.handle, async_op=True).wait


def start_exchange(outgoing: Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int], group: Group) -> Exchange:
    """Starts sending each other rank of a group its part of a tensor `[n]`. The returned function waits for what each
    rank has sent, in rank order; nothing from this one.

    Args:
        to_ranks, from_ranks: how many values go to each rank, and come from it; those for this rank are not looked at.
    """
    require_dense(outgoing)
    sent, received = ([0 if rank == group.rank else n for rank, n in enumerate(c)] for c in (to_ranks, from_ranks))
    incoming = outgoing.new_empty(sum(received))
    traffic.record(group.name, incoming.nbytes)
    work = dist.all_to_all_single(incoming, outgoing, received, sent, group=group.handle, async_op=True)

    def wait() -> list[Tensor]:
        work.wait()
        let_others_go()
        return list(incoming.split(received))

    return wait


class _Channels(torch.autograd.Function):
    """Channels of all ranks side by side, or a rank's own part of what all of them have whole; backward does the other.

    Gradients of what was gathered are whole on every rank: it is for what all go on with in the same way (a loss).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, gathers: bool) -> Tensor:
        ctx.group, ctx.gathers = group, gathers
        return _exchanged(x, group, gathers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _exchanged(grad, ctx.group, not ctx.gathers), None, None


def _exchanged(x: Tensor, group: Group, gathers: bool) -> Tensor:
    if not gathers:
        channels = x.shape[2] // group.size
        return x.narrow(2, group.rank * channels, channels).clone()
    if x.is_meta:
        return x.new_empty((*x.shape[:2], group.size * x.shape[2], *x.shape[3:]))
    return from_matrix(gather_columns(to_matrix(x), group, Content.DENSE)[0], x.shape)


def gather_alike(x: Tensor, group: Group) -> Tensor:
    """[T, N, C/size, *space] -> [T, N, C, *space], for a result that every rank uses in the same way."""
    return x if group.size == 1 else _Channels.apply(x, group, True)


def own_channels(x: Tensor, group: Group) -> Tensor:
    """[T, N, C, *space], whole and the same on every rank -> [T, N, C/size, *space].

    Raises:
        ValueError: channels that do not divide by the number of ranks.
    """
    if group.size == 1:
        return x
    if x.ndim < 3 or x.shape[2] % group.size:
        what = f"the {x.shape[2]} channels of" if x.ndim > 2 else "the channels (dimension 2), which are missing, of"
        raise ValueError(
            f"{what} the output {list(x.shape)} do not divide by --tensor-model-parallel-size {group.size}"
        )
    return _Channels.apply(x, group, False)


@dataclass
class Traffic:
    """Calls and bytes of a group; `dense_bytes` is what the same tensors are without packing."""

    calls: int = 0
    bytes: int = 0
    dense_bytes: int = 0

    def add(self, calls: int, moved: int, dense: int) -> None:
        self.calls, self.bytes, self.dense_bytes = self.calls + calls, self.bytes + moved, self.dense_bytes + dense


class CommStatistics:
    """Counters of traffic. Recording costs a dictionary look-up for each collective, nothing outside of counting."""

    def __init__(self) -> None:
        self.enabled = False
        self.reset()

    def reset(self) -> None:
        self.by_group: dict[str, Traffic] = defaultdict(Traffic)

    @contextmanager
    def counting(self, enabled: bool = True) -> Iterator[None]:
        """Turns counting on, or off, for a while."""
        before, self.enabled = self.enabled, enabled
        try:
            yield
        finally:
            self.enabled = before

    def record(self, group: str, moved: int, dense: int | None = None) -> None:
        if self.enabled:
            self.by_group[group].add(1, moved, moved if dense is None else dense)

    def total(self) -> Traffic:
        total = Traffic()
        for each in self.by_group.values():
            total.add(each.calls, each.bytes, each.dense_bytes)
        return total


traffic = CommStatistics()
