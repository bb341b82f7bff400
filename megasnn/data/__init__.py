"""Images and events in webdataset shards: opened by index, ordered by the seed alone, cut into global batches."""

from megasnn.data.datasets import Datasets as Datasets
from megasnn.data.datasets import ShardDataset as ShardDataset
from megasnn.data.datasets import open_datasets as open_datasets
from megasnn.data.loader import BatchLoader as BatchLoader
from megasnn.data.loader import BatchShare as BatchShare
from megasnn.data.loader import MicroBatch as MicroBatch
from megasnn.data.loader import RankBatch as RankBatch
