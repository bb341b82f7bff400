"""Cuts a global batch into micro-batches, and deals them out to replicas.

The cut depends on the global batch and micro-batch sizes only. Normalisation works per micro-batch, so this
is what makes every layout compute the same function: a replica takes some of the micro-batches, it never
cuts them anew.
"""

from __future__ import annotations


def micro_batch_sizes(global_batch_size: int, micro_batch_size: int) -> list[int]:
    """Samples in each micro-batch, in order; the last one is smaller where the sizes do not divide."""
    whole, rest = divmod(global_batch_size, micro_batch_size)
    return [micro_batch_size] * whole + [rest] * (rest > 0)


def micro_batches_of(micro_batches: int, dp_size: int, dp_rank: int, may_be_none: bool = False) -> range:
    """The contiguous run of global micro-batch indices that one data parallel replica computes.

    The first replicas take one more where the number does not divide. Raises ValueError when a replica
    would get none, unless it may, in evaluation.
    """
    if micro_batches < dp_size and not may_be_none:
        raise ValueError(
            f"{micro_batches} micro-batch(es) cannot be shared by {dp_size} data parallel replicas; "
            f"raise --global-batch-size or lower --micro-batch-size"
        )
    each, extra = divmod(micro_batches, dp_size)
    start = dp_rank * each + min(dp_rank, extra)
    return range(start, start + each + (dp_rank < extra))
