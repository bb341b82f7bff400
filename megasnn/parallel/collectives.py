"""Sharded layers' collectives on activations as matrices.

`[T, N, C, *space]` with channels last in memory is the matrix `[T*N*space, C]`. Tensor parallelism shards its columns.
Every collective returns early on a group of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.common.memory import let_others_go
from megasnn.common.recompute import cached_collective
from megasnn.kernels.layout import empty
from megasnn.kernels.spike_codec import Content, decode_into, encode
from megasnn.parallel.traffic import traffic
from megasnn.parallel_state import Group

Exchange = Callable[[], list[Tensor]]

# torch 2.13 renamed it.
_ALL_GATHER_SINGLE = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def to_matrix(x: Tensor) -> Tensor:
    """[T, N, C, *space] -> [T*N*space, C]; a view if channels are last in memory, otherwise a copy."""
    # With a single channel, reshape returns a strided view of the other channels' memory.
    return x.movedim(2, -1).reshape(-1, x.shape[2]).contiguous()


def from_matrix(matrix: Tensor, like: tuple[int, ...] | torch.Size) -> Tensor:
    """Inverse of `to_matrix`, as a view. `like` is (T, N, any, *space)."""
    time, samples, _, *space = like
    return matrix.view(time, samples, *space, matrix.shape[1]).movedim(-1, 2)


def gather_columns(
    rows: Tensor, group: Group, content: Content, bits: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """[R, C/size] -> [R, C], and its packed payloads, the cheapest copy for backward: one of all ranks, or one of each.

    Args:
        bits: the packed rows, if available.
    """

    if group.size == 1:
        return rows, [encode(rows.reshape(-1), content, check=True) if bits is None else bits]
    payloads = cached_collective(partial(_all_payloads, rows, group, content, bits))
    whole = len(rows), group.size * rows.shape[1]
    return join_columns(payloads, content, whole, rows.dtype), payloads


def _all_payloads(rows: Tensor, group: Group, content: Content, bits: Tensor | None) -> list[Tensor]:
    mine = encode(rows.reshape(-1), content, check=True) if bits is None else bits
    others = group.size - 1
    traffic.record(group.name, "all-gather", others * mine.nbytes, others * rows.nbytes)
    payloads = all_gather_into(mine.new_empty(group.size * mine.numel()), mine, group)
    if content is not Content.SPIKES or rows.shape[1] % 8:
        return payloads
    # Rows of whole bytes are joined while they are bits: sums over spikes and backward then read them as on one rank.
    row_bytes = rows.shape[1] // 8
    return [torch.cat([payload.view(-1, row_bytes) for payload in payloads], dim=1).view(-1)]


def require_dense(tensor: Tensor) -> None:
    """Raises ValueError if a tensor is not contiguous."""
    # Gloo would exchange its memory in storage order and report success (findings/gloo_memory_order.sh).
    if not tensor.is_contiguous():
        order = f"shape {list(tensor.shape)}, strides {list(tensor.stride())}"
        raise ValueError(f"exchanges between ranks need contiguous tensors, not {order}: call .contiguous() first")


def all_gather_into(into: Tensor, mine: Tensor, group: Group) -> list[Tensor]:
    """All-gathers equal parts. Returns views of `into`, in rank order.

    Args:
        into: contiguous, with `group.size * n` elements.
    """
    require_dense(mine)
    parts = list(into.view(group.size, -1).unbind())
    mine = mine.view(-1)
    if not mine.numel():
        return parts
    handle = group.handle
    pending: list[dist.Work | None]
    if mine.device.type == "cpu" and group.is_gloo:
        # Gloo's all-gather switches threads at each step. Two ranks on two cores: 5 kB take 330 us and 18 MB take
        # 77 ms; messages take 98 us and 30 ms.
        parts[group.rank].copy_(mine)
        peers = [rank for rank in range(group.size) if rank != group.rank]
        pending = []
        for peer in peers:
            pending.append(dist.irecv(parts[peer], group.ranks[peer], group=handle))
        for peer in peers:
            pending.append(dist.isend(mine, group.ranks[peer], group=handle))
    else:
        # NCCL fills a list of tensors by way of one flat tensor and a copy. Flat input: Gloo refuses a GPU's matrix.
        pending = [_ALL_GATHER_SINGLE(into.view(-1), mine, group=handle, async_op=True)]
    for work in pending:
        if work is not None:
            work.wait()
    let_others_go()
    return parts


def join_columns(
    payloads: list[Tensor], content: Content, shape: tuple[int, int] | torch.Size, dtype: torch.dtype
) -> Tensor:
    """Unpacks payloads, one or each of equally many columns, into one tensor of `shape` = [R, C]."""
    if len(payloads) == 1 and content is Content.DENSE:
        return payloads[0].view(shape).to(dtype)
    columns = shape[1] // len(payloads)
    full = empty(shape, dtype, payloads[0].device)
    for index, payload in enumerate(payloads):
        decode_into(payload, content, full[:, index * columns : (index + 1) * columns])
    return full


def sum_and_scatter_columns(rows: Tensor, group: Group) -> Callable[[], Tensor]:
    """Starts summing [R, C]. The returned function waits, and returns this rank's [R, C/size]."""
    if group.size == 1:
        return lambda: rows
    row_count, columns = rows.shape
    # An all-to-all and a local sum: the bits do not depend on the backend's algorithm, and on Gloo it is several times
    # faster than a reduce-scatter.
    by_rank = rows.view(row_count, group.size, columns // group.size).transpose(0, 1)
    # The own part stays where it is: it is copied neither into the message nor by the backend.
    outgoing = torch.cat((by_rank[: group.rank], by_rank[group.rank + 1 :]))
    incoming = torch.empty_like(outgoing)
    traffic.record(group.name, "reduce-scatter", outgoing.nbytes)
    counts = [1] * group.size
    counts[group.rank] = 0
    pending = [dist.all_to_all_single(incoming, outgoing, counts, counts, group=group.handle, async_op=True)]

    def finish() -> Tensor:
        pending[0].wait()
        let_others_go()
        # The work object keeps `outgoing` alive.
        pending.clear()
        parts = list(incoming.unbind())
        parts.insert(group.rank, by_rank[group.rank])
        return sum_in_rank_order(parts)

    return finish


def sum_in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """Sum from first to last. bfloat16 accumulates in float32 and rounds once."""
    if parts[0].dtype == torch.bfloat16:
        return sum_in_rank_order([part.float() for part in parts]).to(parts[0].dtype)
    if len(parts) == 1:
        return parts[0].clone()
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def all_reduce_sum(tensor: Tensor, group: Group) -> Tensor:
    """Sums in place."""
    if group.size > 1:
        start_all_reduce_sum(tensor, group)()
    return tensor


def start_all_reduce_sum(tensor: Tensor, group: Group) -> Callable[[], object]:
    """Starts summing over several ranks in place. The returned function waits."""
    require_dense(tensor)
    # The least traffic of any algorithm: each rank sums one part and receives the others.
    traffic.record(group.name, "all-reduce", 2 * (group.size - 1) * tensor.nbytes // group.size)
    return dist.all_reduce(tensor, group=group.handle, async_op=True).wait


def start_exchange(outgoing: Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int], group: Group) -> Exchange:
    """Starts an uneven all-to-all. The returned function waits, and returns received parts by rank.

    Args:
        outgoing: `[n]`, the other ranks' parts in rank order.
        to_ranks, from_ranks: elements by rank; this rank's are ignored.
    """
    require_dense(outgoing)
    sent = list(to_ranks)
    received = list(from_ranks)
    sent[group.rank] = received[group.rank] = 0
    incoming = outgoing.new_empty(sum(received))
    traffic.record(group.name, "all-to-all", incoming.nbytes)
    work = dist.all_to_all_single(incoming, outgoing, received, sent, group=group.handle, async_op=True)

    def wait() -> list[Tensor]:
        work.wait()
        let_others_go()
        return list(incoming.split_with_sizes(received))

    return wait


class _Channels(torch.autograd.Function):
    """Gathers channels, or takes a replicated tensor's own ones. Backward does the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, gathers: bool) -> Tensor:
        ctx.group = group
        ctx.gathers = gathers
        return _gather_or_take(x, group, gathers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather_or_take(grad, ctx.group, not ctx.gathers), None, None


def _gather_or_take(x: Tensor, group: Group, gathers: bool) -> Tensor:
    if not gathers:
        channels = x.shape[2] // group.size
        return x.narrow(2, group.rank * channels, channels).clone()
    if x.is_meta:
        return x.new_empty((*x.shape[:2], group.size * x.shape[2], *x.shape[3:]))
    matrix, _ = gather_columns(to_matrix(x), group, Content.DENSE)
    return from_matrix(matrix, x.shape)


def gather_alike(x: Tensor, group: Group) -> Tensor:
    """[T, N, C/size, *space] -> [T, N, C, *space], for equal gradients on every rank."""
    return x if group.size == 1 else _Channels.apply(x, group, True)


def own_channels(x: Tensor, group: Group) -> Tensor:
    """Replicated [T, N, C, *space] -> [T, N, C/size, *space].

    Raises ValueError if the channels do not divide by the group size.
    """
    if group.size == 1:
        return x
    flag = f"--tensor-model-parallel-size {group.size}"
    if x.ndim < 3:
        raise ValueError(f"the output {list(x.shape)} has no channels (dimension 2) to divide by {flag}")
    if x.shape[2] % group.size:
        raise ValueError(f"the {x.shape[2]} channels of the output {list(x.shape)} do not divide by {flag}")
    return _Channels.apply(x, group, False)
