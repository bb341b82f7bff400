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


def micro_batches_of(micro_batches: int, dp_size: int, dp_rank: int) -> range:
    """The contiguous run of global micro-batch indices that one data parallel replica computes.

    The first replicas take one more where the number does not divide; in evaluation, the last may get none.
    """
    each, extra = divmod(micro_batches, dp_size)
    start = dp_rank * each + min(dp_rank, extra)
    return range(start, start + each + (dp_rank < extra))


def micro_batch_counts(samples: int, micro_batch_size: int, replicas: int, windows: int = 1) -> tuple[int, ...]:
    """Micro-batches in a step of the replica with most, and of the one with least where that has another number.

    Args:
        samples: of the global batch. windows: of time steps, each of which is a micro-batch of its own.
    """
    count = -(-samples // min(micro_batch_size, samples))
    return tuple(windows * each for each in dict.fromkeys((-(-count // replicas), count // replicas)))
