"""Sources of samples, and how samples are changed."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from megasnn.augment import AUGMENTATIONS
from megasnn.augment.images import ImageRecipe, parse_rand_augment
from megasnn.common.files import SAMPLE_MB, STRICT
from megasnn.config.checks import Count, FileName, Fraction, NonNegative, Size, flag, refusal

SAMPLE = "sample"
"""As a path it stands for scikit-learn's digits."""
PATHS = ("data_path", "valid_data_path")
"""Fields that name shards, or commands whose output is one."""
PIPE = "pipe:"
"""Begins a command whose output is a shard. Only a command line may give one."""
CHANGES = (
    *("crop_scale", "rand_augment", "random_erasing", "normalize_images"),
    *("center_crop", "mixup_alpha", "cutmix_alpha", "mixup_off_epoch"),
)
"""Fields that change samples beside `augment`, all of them for images alone."""


def names_command(data_path: str) -> bool:
    """True where a data path holds a command, written out: what it expands to may hold none then either."""
    return any(part.startswith(PIPE) for part in data_path.split("::"))


FractionAboveZero = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """The order of samples depends on the seed only, never on the layout or the number of workers."""

    data_path: FileName = SAMPLE
    """Training shards: "dir/train-{00000..00009}.tar", a folder, or a URL; "sample" is scikit-learn's digits."""
    valid_data_path: FileName | None = None
    """Validation shards; with --data-path sample, its held-out part by default."""
    shuffle: bool = True
    """Shuffle every epoch; --no-shuffle keeps the order of the files."""
    last_batch: Literal["continue", "drop"] = "continue"
    """Last samples of an epoch that fill no global batch: continue into the next epoch, or drop."""
    num_workers: Count = 1
    """Processes of a rank that read ahead; 0 reads in the training process."""
    augment: Annotated[str, AUGMENTATIONS] = "none"
    """Random changes, the same for a sample on any layout."""
    crop_scale: FractionAboveZero = 0.08
    """With --augment crop, the least share of an image's area that is kept; 1 keeps square images whole."""
    rand_augment: str | None = None
    """RandAugment on top, as timm names it, rand-m9-mstd0.5-inc1; operations to choose from behind a colon."""
    random_erasing: Fraction = 0.0
    """Share of the images of which a rectangle is replaced by the mean, after all other changes."""
    normalize_images: Literal["generic", "cifar10", "imagenet", "digits"] | None = None
    """Constants by which images are normalised; by default those that go with --augment or the data."""
    center_crop: FractionAboveZero = 1.0
    """Share of an image's shorter side that is kept of its middle, in evaluation and without --augment crop."""
    mixup_alpha: NonNegative = 0.0
    """Parameter of mixup's beta distribution; 0 mixes nothing."""
    cutmix_alpha: NonNegative = 0.0
    """The same for cutmix; with --mixup-alpha, each is done in half of the micro-batches."""
    mixup_off_epoch: Count = 0
    """Epochs after which neither --mixup-alpha nor --cutmix-alpha mixes any more; 0: never."""
    split_by: Literal["number", "time"] | None = None
    """Frames of a recording have equal shares of its events (number, the default) or of its time."""
    skip_broken_samples: bool = False
    """Count samples that cannot be read and go on, instead of stopping."""
    max_sample_mb: Size = SAMPLE_MB
    """A sample that takes more megabytes, in its file or decoded, cannot be read."""

    @property
    def mixes(self) -> bool:
        """True when samples are mixed with each other, and labels are probabilities."""
        return self.mixup_alpha > 0 or self.cutmix_alpha > 0

    def changed(self, *names: str) -> list[str]:
        """Flags of these fields that differ from their defaults."""
        return [
            flag(each.name)
            for each in fields(self)
            if each.name in names and getattr(self, each.name) != getattr(type(self), each.name)
        ]

    def normalisation(self, channels: int, evaluates: bool) -> str:
        """Name of the constants by which images of so many channels are normalised: those that are trained on, and all
        that are evaluated meanwhile.

        Args:
            evaluates: and trains on nothing.
        """
        path = self.valid_data_path if evaluates and self.valid_data_path is not None else self.data_path
        if self.normalize_images is not None:
            return self.normalize_images
        if path == SAMPLE:
            return "digits"
        return AUGMENTATIONS[self.augment].normalisation if channels == 3 else "generic"

    @property
    def image_recipe(self) -> ImageRecipe:
        """Changes of images beside what `augment` names. Raises ValueError for an unknown `rand_augment`."""
        name, _, operations = (self.rand_augment or "").partition(":")
        changes: dict[str, Any] = {"rand_augment": parse_rand_augment(name, operations or None)} if name else {}
        return ImageRecipe(self.crop_scale, erasing=self.random_erasing, **changes)

    def problems(self) -> list[str]:
        """Contradictions, with values and flags."""
        return refusal(lambda: self.image_recipe)
