"""Sizes of gradient buckets, and bytes of their exchange between the ranks that share shards. Needs no torch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

CPU_BUCKET_BYTES = 8 << 20
# Links between GPUs reach their speed with messages of some megabytes (PyTorch's DDP: 25 MiB).
GPU_BUCKET_BYTES = 32 << 20
EXCHANGES_AT_ONCE = 2


def bucket_bytes(on_gpu: bool) -> int:
    """Bytes after which a bucket is closed."""
    return GPU_BUCKET_BYTES if on_gpu else CPU_BUCKET_BYTES


def pack(tensors: Sequence[tuple[int, Hashable]], limit: int) -> list[range]:
    """Consecutive tensors of each bucket. A bucket is closed once it holds `limit` bytes.

    Args:
        tensors: bytes and type of each; a bucket has one type.
    """
    buckets: list[range] = []
    start = 0
    size = 0
    for index, (tensor_bytes, kind) in enumerate(tensors):
        is_full = size >= limit
        if index > start and (is_full or kind != tensors[start][1]):
            buckets.append(range(start, index))
            start = index
            size = 0
        size += tensor_bytes
    if tensors:
        buckets.append(range(start, len(tensors)))
    return buckets


def exchange_bytes(bucket: int, own: int, ranks: int) -> int:
    """Peak bytes of one bucket's exchange: sent and received rows, and a copy of both at its end.

    Args:
        bucket: bytes of all rows.
        own: bytes of this rank's rows, which it receives from every other rank.
    """
    sent = bucket - own
    received = (ranks - 1) * own
    return 2 * (sent + received)


def peak_exchange_bytes(exchanges: Iterable[int]) -> int:
    """Peak bytes of a step's exchanges, of which two run at a time."""
    return sum(sorted(exchanges)[-EXCHANGES_AT_ONCE:])
