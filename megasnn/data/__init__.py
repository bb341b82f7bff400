"""Images and events in webdataset shards: opened by index, ordered by the seed alone, cut into global batches.

`open_datasets` and `BatchLoader` are what training uses; the rest is reached through its own module.
"""

from megasnn.data.dataset import BrokenSample, ShardDataset
from megasnn.data.loader import BatchLoader, GlobalBatch, MicroBatch, order_identity
from megasnn.data.open import Datasets, open_datasets

__all__ = [
    "BatchLoader",
    "BrokenSample",
    "Datasets",
    "GlobalBatch",
    "MicroBatch",
    "ShardDataset",
    "open_datasets",
    "order_identity",
]
