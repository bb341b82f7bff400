"""Random changes of a sample, keyed by seed, epoch and sample: no layout or worker count alters them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from numpy.typing import NDArray

from megasnn.augment.event_frames import flip_and_one_more, flip_and_roll
from megasnn.augment.images import crop_and_flip, flip
from megasnn.common.registry import Registry

__all__ = ["AUGMENTATIONS", "FRAMES", "IMAGES", "Augmentation", "crop_and_flip", "flip_and_one_more", "flip_and_roll"]

IMAGES, FRAMES = "images", "event frames"  # kinds of samples
SampleKey = tuple[int, int, int]
"""Key of a random change: seed, epoch, number of the sample."""


@dataclass(frozen=True)
class Augmentation:
    """Random change of decoded samples.

    Attributes:
        summary: for --help.
        change: (sample, seed, epoch, number of the sample) -> another one of the same shape.
        samples: the kinds that it is for.
        normalisation: the name of the constants by which RGB images are normalised with it.
        crops: a random part of the image as its file has it is scaled to the model's size, not its middle.
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
        "none": Augmentation("", unchanged, (IMAGES, FRAMES)),
        "cifar": Augmentation("crop and flip images", crop_and_flip, (IMAGES,), normalisation="cifar10"),
        "cifar2": Augmentation(
            "the same, by 2 pixels at most and not 4: for short trainings",
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
        "dvs": Augmentation("flip and roll event frames", flip_and_roll, (FRAMES,)),
        "nda": Augmentation(
            "flip them, then roll, rotate, shear or cut out (Li et al. 2022)", flip_and_one_more, (FRAMES,)
        ),
    },
)
