"""Gradient bucket sizes, and exchanged bytes between ranks that share shards. Needs no torch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

CPU_BUCKET_BYTES = 8 << 20
# Links between GPUs reach their speed with messages of some megabytes (PyTorch's DDP: 25 MiB).
GPU_BUCKET_BYTES = 32 << 20
EXCHANGES_AT_ONCE = 2


def bucket_spans(tensors: Sequence[tuple[int, Hashable]], on_gpu: bool) -> list[range]:
    """Consecutive tensors by bucket. A full bucket is closed.

    Args:
        tensors: (bytes, type); a bucket has one type.
    """
    limit = GPU_BUCKET_BYTES if on_gpu else CPU_BUCKET_BYTES
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
    """A bucket's peak: sent and received rows, and a copy of both at its end.

    Args:
        bucket: bytes of all rows.
        own: bytes of this rank's rows, received from every other rank.
    """
    sent = bucket - own
    received = (ranks - 1) * own
    return 2 * (sent + received)


class Gradient(NamedTuple):
    """A parameter's gradient on one rank.

    Attributes:
        size: bytes.
        rows: length of the first dimension, which shards divide; 1 for a scalar.
    """

    size: int
    rows: int
    kind: Hashable

    def shard(self, ranks: int) -> int:
        """The first rank's bytes, with one more row if rows do not divide evenly."""
        return self.size // max(self.rows, 1) * -(-self.rows // ranks)


def exchanges_of(gradients: Sequence[Gradient], ranks: int, on_gpu: bool) -> list[int]:
    """By bucket, peak bytes on the first rank; none on one rank.

    Args:
        gradients: a chunk's, in backward order.
    """
    if ranks == 1:
        return []
    found = []
    for span in bucket_spans([(each.size, each.kind) for each in gradients], on_gpu):
        bucket = gradients[span.start : span.stop]
        own = sum(each.shard(ranks) for each in bucket)
        found.append(exchange_bytes(sum(each.size for each in bucket), own, ranks))
    return found


def peak_exchange_bytes(exchanges: Iterable[int]) -> int:
    """A step's peak: two exchanges run at a time."""
    return sum(sorted(exchanges)[-EXCHANGES_AT_ONCE:])
