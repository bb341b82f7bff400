"""Samples at positions of the order: decoded, augmented, replaced where they are broken, joined to micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from megasnn.augment import Augmentation
from megasnn.data.dataset import BrokenSample, ShardDataset
from megasnn.data.order import Position, SampleOrder

Item = tuple[int, NDArray[Any] | None]
"""Sample that is used at a position and, where images are needed, its data."""


class PositionDataset(Dataset[Item | Exception]):
    """Map-style data set for a DataLoader, from positions of the order to samples.

    Errors of the data are returned as exceptions: a DataLoader would raise them with a traceback for their text.

    Args:
        augment: None changes nothing.
        need_images: False on ranks that need only to know which samples `skip_broken` replaces.
        skip_broken: replaces a sample that cannot be decoded by the next one of the epoch's order.
    """

    def __init__(
        self,
        dataset: ShardDataset,
        order: SampleOrder,
        augment: Augmentation | None,
        need_images: bool = True,
        skip_broken: bool = False,
    ) -> None:
        self._dataset, self._order, self._augment = dataset, order, augment
        self._need_images, self._skip_broken = need_images, skip_broken

    def __getitem__(self, position: Position) -> Item | Exception:
        try:
            for sample in self._order.substitutes(position):
                try:
                    return sample, self._read(position, sample)
                except BrokenSample:
                    if not self._skip_broken:
                        raise
            raise ValueError(f"none of the {len(self._dataset)} samples can be decoded")
        except (ValueError, OSError) as error:
            return error

    def collate(self, items: Sequence[Item | Exception]) -> tuple[list[int], Tensor | None] | Exception:
        """Samples of a micro-batch and their images as the model takes them; the first exception among them."""
        samples: list[int] = []
        images: list[NDArray[Any]] = []
        for item in items:
            if isinstance(item, Exception):
                return item
            sample, image = item
            samples.append(sample)
            if image is not None:
                images.append(image)
                if image.shape != images[0].shape:
                    return ValueError(
                        f"{self._dataset.describe(sample)} has the shape {image.shape} and the first one of its "
                        f"micro-batch {images[0].shape}; its samples must have one shape"
                    )
        if not images:
            return samples, None
        values = torch.from_numpy(self._dataset.format.batch(images))
        if get_worker_info() is not None:
            values.share_memory_()  # in torch's own thread an error of a full /dev/shm would be lost
        return samples, values

    def _read(self, position: Position, sample: int) -> NDArray[Any] | None:
        """Decodes a sample, and augments it by the key of its position, also where it stands in for another one."""
        if self._augment is None or not self._need_images:
            image = self._dataset.sample(sample)
            return image if self._need_images else None
        key = self._order.seed, position.epoch, position.sample
        decode = self._augment.decoder(*key) if self._augment.decoder else None
        return self._augment(self._dataset.sample(sample, decode), *key)
