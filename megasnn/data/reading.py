"""Samples of a micro-batch as a rank needs them: decoded, augmented, and replaced where they are broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megasnn.augment import Augmentation
from megasnn.data.dataset import BrokenSample, ShardDataset
from megasnn.data.formats import SampleFormat
from megasnn.data.order import SampleOrder, Slot, Stretch

Room: TypeAlias = "Callable[[tuple[int, ...]], NDArray[np.float32]]"
"""Gives memory for the values of samples, from their shape `[samples, *sample]`."""


@dataclass(frozen=True)
class SlotReader:
    """Reads the samples of slots, in the training process or in another: it can be pickled and needs no torch.

    Attributes:
        augment: None changes nothing.
        need_images: False on ranks that need only to know which samples are broken.
        skip_broken: put the next sample of the epoch's order that decodes in the place of one that does not.
    """

    dataset: ShardDataset[SampleFormat]
    order: SampleOrder
    seed: int
    augment: Augmentation | None
    need_images: bool
    skip_broken: bool

    def read(self, stretches: Sequence[Stretch], room: Room) -> tuple[list[int], NDArray[np.float32] | None]:
        """The samples that are used in their slots, and, where images are needed, their values as `SampleFormat.fill`
        writes them.

        Args:
            room: asked once, when the first sample is decoded. Each is written there at once: kept until all are
                decoded, samples would take new memory for every batch.
        Raises:
            BrokenSample: one cannot be decoded, and is not to be skipped.
            ValueError: as `ShardDataset.sample`; not one sample of the data set can be decoded; samples are of several
                shapes.
        """
        slots = [slot for stretch in stretches for slot in stretch.slots()]
        used, values = list[int](), None
        for slot in slots:
            sample, image = self._fetch(slot)
            if image is not None:
                if values is None:
                    values = room((len(slots), *image.shape))
                elif image.shape != values.shape[1:]:
                    raise ValueError(
                        f"{self.dataset.describe(sample)} has the shape {image.shape} and the first one of its "
                        f"micro-batch {values.shape[1:]}; its samples must have one shape"
                    )
                self.dataset.format.fill(values[len(used)], image)
            used.append(sample)
        return used, values

    def _fetch(self, slot: Slot) -> tuple[int, NDArray[Any] | None]:
        if not self.skip_broken:
            return slot.sample, self._image(slot, slot.sample) if self.need_images else None
        for sample in self.order.from_slot(slot):
            if not self.need_images:
                if self.dataset.decodes(sample):
                    return sample, None
                continue
            try:
                return sample, self._image(slot, sample)
            except BrokenSample:
                continue
        raise ValueError(f"none of the {len(self.dataset)} samples can be decoded, {self.dataset.describe(0)} for one")

    def _image(self, slot: Slot, sample: int) -> NDArray[Any]:
        """The decoded sample; augmented by the slot's own key, also where another sample stands in."""
        if self.augment is None:
            return self.dataset.sample(sample)
        return augmented(self.dataset, sample, self.augment, self.seed, slot.epoch, slot.sample)


def augmented(
    dataset: ShardDataset[SampleFormat], sample: int, augment: Augmentation, seed: int, epoch: int, number: int
) -> NDArray[Any]:
    """A decoded sample, changed under the key of seed, epoch and number. Raises what `ShardDataset.sample` raises."""
    decode = augment.decoder(seed, epoch, number) if augment.decoder else None
    return augment(dataset.sample(sample, decode), seed, epoch, number)
