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
from megasnn.data.workers import SHARED_MEMORY

Item = tuple[int, NDArray[Any] | None]
"""The sample that is used at a position and, where images are needed, its data."""


class PositionDataset(Dataset[Item | Exception]):
    """Map-style data set for a DataLoader, from positions of the order to samples.

    What is wrong with the data is given as an exception: a DataLoader would raise it with a traceback for its text.

    Args:
        augment: None changes nothing.
        need_images: False on ranks that need only to know which samples `skip_broken` replaces.
        skip_broken: put the next sample of the epoch's order that decodes in the place of one that does not.
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
        self._decodes: dict[int, bool] = {}  # of samples that are decoded only to know that

    def __getitem__(self, position: Position) -> Item | Exception:
        try:
            if self._skip_broken:
                return self._find(position)
            return position.sample, self._read(position, position.sample)
        except (ValueError, OSError) as error:
            return error

    def collate(self, items: Sequence[Item | Exception]) -> tuple[list[int], Tensor | None] | Exception:
        """The samples of a micro-batch and their images as the model takes them; the first exception among them."""
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
            try:
                values.share_memory_()
            except RuntimeError as error:
                return ChildProcessError(f"a data worker has no shared memory ({error}); {SHARED_MEMORY}")
        return samples, values

    def _find(self, position: Position) -> Item:
        """The first sample from a position on that can be decoded."""
        for sample in self._order.substitutes(position):
            if not self._need_images and self._decodes.get(sample):
                return sample, None
            try:
                image = self._read(position, sample)
            except BrokenSample:
                continue
            self._decodes[sample] = True
            return sample, image if self._need_images else None
        raise ValueError(
            f"none of the {len(self._dataset)} samples can be decoded, {self._dataset.describe(0)} for one"
        )

    def _read(self, position: Position, sample: int) -> NDArray[Any]:
        """The decoded sample; augmented by the key of its position, also where it stands in for another one."""
        if self._augment is None or not self._need_images:
            return self._dataset.sample(sample)
        key = self._order.seed, position.epoch, position.sample
        decode = self._augment.decoder(*key) if self._augment.decoder else None
        return self._augment(self._dataset.sample(sample, decode), *key)
