"""Data parallelism: gradients in contiguous buckets, reduced while backward still runs; replicas that stay equal."""

from megasnn.data_parallel.buckets import BucketedDataParallel
from megasnn.data_parallel.checksum import checksum
from megasnn.data_parallel.replicas import ReplicaCheck, ReplicaError
from megasnn.data_parallel.statistics import merge_running_statistics

__all__ = ["BucketedDataParallel", "ReplicaCheck", "ReplicaError", "checksum", "merge_running_statistics"]
