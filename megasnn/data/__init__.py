"""Images and events in webdataset shards: opened by index, ordered by the seed alone, cut into global batches.

Training uses `open_datasets` and `BatchLoader`; the rest is reached through its own module. The names below are loaded
when they are first used: the processes that read samples do without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megasnn.lazy import lazy_names

if TYPE_CHECKING:  # where each name comes from, for type checkers and for `lazy_names`
    from megasnn.data.dataset import BrokenSample as BrokenSample
    from megasnn.data.dataset import ShardDataset as ShardDataset
    from megasnn.data.epochs import check_shares as check_shares
    from megasnn.data.epochs import epoch_samples as epoch_samples
    from megasnn.data.epochs import order_identity as order_identity
    from megasnn.data.loader import BatchLoader as BatchLoader
    from megasnn.data.loader import GlobalBatch as GlobalBatch
    from megasnn.data.loader import MicroBatch as MicroBatch
    from megasnn.data.open import Datasets as Datasets
    from megasnn.data.open import open_datasets as open_datasets

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
