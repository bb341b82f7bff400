"""How many samples an epoch has, what tells orders of them apart, and whether every rank gets some of each batch."""

from __future__ import annotations

from megasnn.batching import micro_batch_sizes, micro_batches_of
from megasnn.data.dataset import ShardDataset


def order_identity(dataset: ShardDataset, global_batch_size: int, last_batch: str) -> str:
    """What tells orders of training samples apart, with seed and shuffling: equal where a position means the same.

    Raises:
        ValueError: as `BatchLoader`, for an epoch without a batch.
    """
    epoch = epoch_samples(len(dataset), global_batch_size, last_batch)
    return dataset.fingerprint() + (f" in epochs of {epoch}" if epoch < len(dataset) else "")


def epoch_samples(samples: int, global_batch_size: int, last_batch: str) -> int:
    """Samples that an epoch trains on.

    Raises:
        ValueError: none, since not one batch is full and the last one is dropped.
    """
    if last_batch != "drop":
        return samples
    if samples < global_batch_size:
        raise ValueError(
            f"--last-batch drop leaves nothing of {samples} training samples: --global-batch-size is "
            f"{global_batch_size}; lower it, or take another --last-batch"
        )
    return samples - samples % global_batch_size


def check_shares(
    samples: int, global_batch_size: int, micro_batch_size: int, dp_size: int, cp_size: int, last_batch: str
) -> None:
    """Raises ValueError when some batch has fewer micro-batches than there are data parallel ranks, or a micro-batch
    fewer samples than ranks that share it."""
    sizes = {global_batch_size}
    if last_batch == "keep":
        sizes = {min(global_batch_size, samples), samples % global_batch_size or global_batch_size}
    for size in sizes:
        each = micro_batch_sizes(size, min(micro_batch_size, size))
        count = len(each)
        if count < dp_size and size < global_batch_size:
            raise ValueError(
                f"--last-batch keep makes a batch of {size} samples, {count} micro-batch(es), at the end of an epoch: "
                f"too few for {dp_size} data parallel replicas; lower --micro-batch-size, or take another --last-batch"
            )
        if each[-1] < cp_size:
            raise ValueError(
                f"a batch of {size} samples (--global-batch-size {global_batch_size}, --last-batch {last_batch}) has a "
                f"micro-batch of {each[-1]}: too few for --context-parallel-size {cp_size} by samples; change "
                "--micro-batch-size, or with keep take another --last-batch"
            )
        micro_batches_of(count, dp_size, 0)
