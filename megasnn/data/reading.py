"""Micro-batches of the order's spans: samples decoded, augmented, replaced where they are broken, and joined."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from megasnn.augment import Key
from megasnn.data.dataset import BrokenSample, ShardDataset
from megasnn.data.order import SampleOrder, Span

Item = tuple[Tensor | dict[str, Tensor] | None, dict[int, int]]
"""Images of a micro-batch, or arrays by name, and of each that stands in for a broken one its place and sample."""


class SpanDataset(Dataset[Item | Exception]):
    """Map-style data set for a DataLoader, from the spans of a micro-batch to its images.

    Errors of the data are returned as exceptions: a DataLoader would raise them with a traceback for their text.

    Args:
        augments: changes samples by the keys of their positions.
        skip_broken: replaces a sample that cannot be decoded by the next one of the epoch's order.
    """

    def __init__(self, dataset: ShardDataset, order: SampleOrder, augments: bool, skip_broken: bool) -> None:
        self._dataset, self._order = dataset, order
        self._augments, self._skip_broken = augments, skip_broken

    def __getitem__(self, spans: list[Span]) -> Item | Exception:
        images: list[Any] = []
        replaced: dict[int, int] = {}
        try:
            for epoch, first, samples in spans:
                for place, sample in enumerate(samples.tolist(), first):
                    key = (self._order.seed, epoch, sample) if self._augments else None
                    try:
                        image = self._dataset.sample(sample, key)
                    except BrokenSample:
                        if not self._skip_broken:
                            raise
                        replaced[len(images)], image = self._substitute(epoch, place, key)
                    images.append(image)
            joined = self._dataset.format.batch(images)
            if isinstance(joined, dict):
                return {name: torch.from_numpy(each) for name, each in joined.items()}, replaced
            return torch.from_numpy(joined), replaced
        except (ValueError, OSError) as error:
            return error

    def _substitute(self, epoch: int, place: int, key: Key | None) -> tuple[int, Any]:
        """The next sample that can be decoded, which is augmented by the key of the place that it takes."""
        for sample in self._order.substitutes(epoch, place):
            with suppress(BrokenSample):
                return sample, self._dataset.sample(sample, key)
        raise ValueError(f"none of the {len(self._dataset)} samples can be decoded")
