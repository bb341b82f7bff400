"""Random changes to samples, keyed by seed, epoch and sample: equal on any layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from numpy.typing import NDArray

from megasnn.augment.event_frames import flip_and_one_more, flip_and_roll
from megasnn.augment.images import crop_and_flip, flip
from megasnn.common.registry import Registry

__all__ = [
    "AUGMENTATIONS",
    "EVENT_FRAMES",
    "IMAGES",
    "Augmentation",
    "crop_and_flip",
    "flip_and_one_more",
    "flip_and_roll",
]

IMAGES = "images"
EVENT_FRAMES = "event frames"
SampleKey = tuple[int, int, int]
"""Key of a random change: seed, epoch, sample number."""


@dataclass(frozen=True)
class Augmentation:
    """A random change to decoded samples.

    Attributes:
        summary: for --help.
        change: (sample, seed, epoch, sample number) -> changed sample, same shape.
        normalisation: default constants for RGB images.
        crops: use a random part, not the image's middle.
    """

    summary: str
    change: Callable[[NDArray[Any], int, int, int], NDArray[Any]]
    samples: tuple[str, ...]
    normalisation: str = "generic"
    crops: bool = False


def unchanged(sample: NDArray[Any], seed: int, epoch: int, number: int) -> NDArray[Any]:
    """The sample itself."""
    return sample


AUGMENTATIONS: Registry[Augmentation] = Registry(
    "--augment",
    {
        "none": Augmentation("", unchanged, (IMAGES, EVENT_FRAMES)),
        "cifar": Augmentation("crop and flip images", crop_and_flip, (IMAGES,), normalisation="cifar10"),
        "cifar2": Augmentation(
            "the same by at most 2 pixels instead of 4, for short trainings",
            partial(crop_and_flip, margin=2),
            (IMAGES,),
            normalisation="cifar10",
        ),
        "crop": Augmentation(
            "scale a random part of each image and flip half of them",
            flip,
            (IMAGES,),
            normalisation="imagenet",
            crops=True,
        ),
        "dvs": Augmentation("flip and roll event frames", flip_and_roll, (EVENT_FRAMES,)),
        "nda": Augmentation(
            "flip them, then roll, rotate, shear or cut out (Li et al. 2022)", flip_and_one_more, (EVENT_FRAMES,)
        ),
    },
)
