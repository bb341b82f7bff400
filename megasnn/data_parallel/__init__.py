"""Data parallelism: gradients in contiguous buckets, reduced while backward still runs."""

from megasnn.data_parallel.buckets import BucketedDataParallel
from megasnn.data_parallel.statistics import merge_running_statistics

__all__ = ["BucketedDataParallel", "merge_running_statistics"]
