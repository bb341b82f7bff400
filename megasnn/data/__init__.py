"""Images and events in webdataset shards: opened by index, ordered by the seed alone, cut into global batches."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megasnn.data.dataset import ShardDataset as ShardDataset
    from megasnn.data.datasets import Datasets as Datasets
    from megasnn.data.datasets import open_datasets as open_datasets
    from megasnn.data.loader import BatchLoader as BatchLoader
    from megasnn.data.loader import GlobalBatch as GlobalBatch
    from megasnn.data.loader import LoaderOptions as LoaderOptions
    from megasnn.data.loader import MicroBatch as MicroBatch
    from megasnn.data.loader import Share as Share

_PLACES = {
    **dict.fromkeys(("BatchLoader", "GlobalBatch", "LoaderOptions", "MicroBatch", "Share"), "loader"),
    **dict.fromkeys(("Datasets", "open_datasets"), "datasets"),
    "ShardDataset": "dataset",
}
__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    """Loads a name when it is first used: its module imports torch."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
