"""Images and events in webdataset shards: opened by index, ordered by the seed alone, cut into global batches.

`open_datasets` and `BatchLoader` are what training uses; the rest is reached through its own module.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megasnn.data.dataset import BrokenSample, ShardDataset
    from megasnn.data.loader import BatchLoader, GlobalBatch, MicroBatch, epoch_samples, order_identity
    from megasnn.data.open import Datasets, open_datasets

__all__ = [
    "BatchLoader",
    "BrokenSample",
    "Datasets",
    "GlobalBatch",
    "MicroBatch",
    "ShardDataset",
    "epoch_samples",
    "open_datasets",
    "order_identity",
]
_HOME = {
    **dict.fromkeys(("BrokenSample", "ShardDataset"), "dataset"),
    **dict.fromkeys(("BatchLoader", "GlobalBatch", "MicroBatch", "epoch_samples", "order_identity"), "loader"),
    **dict.fromkeys(("Datasets", "open_datasets"), "open"),
}


def __getattr__(name: str) -> Any:
    """Imports what is asked for, and no more: the processes that read samples do without torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
