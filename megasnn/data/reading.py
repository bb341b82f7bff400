"""Micro-batches of positions of the order: samples decoded, augmented, replaced where they are broken, and joined."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from megasnn.data.dataset import BrokenSample, ShardDataset
from megasnn.data.order import Position, SampleOrder

Item = tuple[list[int], Tensor | None]
"""Samples that are used at the positions of a micro-batch and, where they are needed, their images."""


def as_read(item: Any) -> Any:
    """Gives a micro-batch on as it is; torch's own function would look at the number of each sample."""
    return item


class PositionDataset(Dataset[Item | Exception]):
    """Map-style data set for a DataLoader, from the positions of a micro-batch to its samples.

    Errors of the data are returned as exceptions: a DataLoader would raise them with a traceback for their text.

    Args:
        augments: changes samples by the keys of their positions.
        need_images: False on ranks that need only to know which samples `skip_broken` replaces.
        skip_broken: replaces a sample that cannot be decoded by the next one of the epoch's order.
    """

    def __init__(
        self, dataset: ShardDataset, order: SampleOrder, augments: bool, need_images: bool, skip_broken: bool
    ) -> None:
        self._dataset, self._order, self._augments = dataset, order, augments
        self._need_images, self._skip_broken = need_images, skip_broken

    def __getitem__(self, positions: list[Position]) -> Item | Exception:
        try:
            samples, images = zip(*map(self._read, positions), strict=True)
            return list(samples), self._join(samples, images) if self._need_images else None
        except (ValueError, OSError) as error:
            return error

    def _read(self, position: Position) -> tuple[int, NDArray[Any]]:
        """Sample at a position, or the one in its place, which is augmented by the key of the position too."""
        augments = self._augments and self._need_images
        key = (self._order.seed, position.epoch, position.sample) if augments else None
        for sample in self._order.substitutes(position):
            try:
                return sample, self._dataset.sample(sample, key)
            except BrokenSample:
                if not self._skip_broken:
                    raise
        raise ValueError(f"none of the {len(self._dataset)} samples can be decoded")

    def _join(self, samples: tuple[int, ...], images: tuple[NDArray[Any], ...]) -> Tensor:
        for sample, image in zip(samples, images, strict=True):
            if image.shape != images[0].shape:
                raise ValueError(
                    f"{self._dataset.describe(sample)} has the shape {image.shape} and the first one of its "
                    f"micro-batch {images[0].shape}; its samples must have one shape"
                )
        values = torch.from_numpy(self._dataset.format.batch(images))
        if get_worker_info() is not None:
            values.share_memory_()  # in torch's own thread an error of a full /dev/shm would be lost
        return values
