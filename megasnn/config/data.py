"""Sources of samples, and their augmentation."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic.dataclasses import dataclass

from megasnn.augment import AUGMENTATIONS
from megasnn.augment.images import ImageRecipe, parse_rand_augment
from megasnn.common.files import SAMPLE_MB, STRICT
from megasnn.config.checks import (
    ConfigError,
    Count,
    FileName,
    Fraction,
    FractionAboveZero,
    NonNegative,
    Size,
    flag,
    refusal,
)

SAMPLE = "sample"
"""Data path of scikit-learn's digits."""
IN_PYTHON = "dataset:"
"""Prefix of a data path that stands for a data set given to `megasnn.pretrain`, followed by its title."""
PATHS = ("data_path", "valid_data_path")
"""Fields with a data path: shards, or commands that print one."""
PIPE = "pipe:"
"""Prefix of a command that prints a shard. Only a command line may give one."""
CHANGES = (
    *("crop_scale", "rand_augment", "random_erasing", "normalize_images"),
    *("center_crop", "mixup_alpha", "cutmix_alpha", "mixup_off_epoch"),
)
"""Fields beside `augment` for changing samples, images only."""
MIXING = ("mixup", "cutmix")
"""Beginnings of the fields among them that change batches, not samples."""


class GivenDatasets(NamedTuple):
    """Data sets in Python, given to `megasnn.pretrain`; None for none."""

    train: Any = None
    valid: Any = None

    @property
    def is_empty(self) -> bool:
        # Not by `==`, which may be the data sets' own.
        return self.train is None and self.valid is None


NO_DATASETS = GivenDatasets()


def names_command(data_path: str) -> bool:
    """Whether a data path contains a command as plain text. Nothing expanded from it later may be one either."""
    return any(part.startswith(PIPE) for part in data_path.split("::"))


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """The order of samples depends on the seed only, not on the layout or the number of workers."""

    data_path: FileName = SAMPLE
    """Training shards: "dir/train-{00000..00009}.tar", a folder, or a URL; "sample" is scikit-learn's digits. For a
    language model: text, a folder of it, or PREFIX of .bin and .idx; "sample" is Python's help."""
    valid_data_path: FileName | None = None
    """Validation shards or text; --data-path sample has its own by default."""
    tokenizer: FileName | None = None
    """A tokenizer.json for text; by default each byte is a token."""
    shuffle: bool = True
    """Shuffle every epoch; --no-shuffle keeps the order of the files."""
    last_batch: Literal["continue", "drop"] = "continue"
    """Samples at the end of an epoch that fill no global batch: continue into the next epoch, or drop."""
    num_workers: Count = 1
    """Processes per rank that read ahead; 0 reads in the training process."""
    augment: Annotated[str, AUGMENTATIONS] = "none"
    """Random changes of samples, the same on any layout."""
    crop_scale: FractionAboveZero = 0.08
    """With --augment crop, the smallest share of an image's area to keep; 1 keeps square images whole."""
    rand_augment: str | None = None
    """RandAugment by timm's name, rand-m9-mstd0.5-inc1; a colon and a list restrict its operations."""
    random_erasing: Fraction = 0.0
    """Probability that a rectangle of an image is replaced by the mean, after all other changes."""
    normalize_images: Literal["generic", "cifar10", "imagenet", "digits"] | None = None
    """Mean and standard deviation for images; by default those of --augment or the data."""
    center_crop: FractionAboveZero = 1.0
    """Share of an image's shorter side to keep around the center, in evaluation and without --augment crop."""
    mixup_alpha: NonNegative = 0.0
    """Parameter of mixup's beta distribution; 0 disables mixup."""
    cutmix_alpha: NonNegative = 0.0
    """Parameter of CutMix's beta distribution; with --mixup-alpha, each is used in half of the micro-batches."""
    mixup_off_epoch: Count = 0
    """Epoch at which --mixup-alpha and --cutmix-alpha are turned off; 0 keeps them on."""
    split_by: Literal["number", "time"] | None = None
    """Split a recording into frames with equal numbers of events (number, the default) or equal times."""
    skip_broken_samples: bool = False
    """Count samples that cannot be read and go on, instead of stopping."""
    max_sample_mb: Size = SAMPLE_MB
    """Refuse samples above this size in MB, in the file or decoded."""

    @property
    def mixes(self) -> bool:
        """Whether samples are mixed with each other, and labels are probabilities."""
        return self.mixup_alpha > 0 or self.cutmix_alpha > 0

    def changed(self, *names: str) -> list[str]:
        """Flags, among these fields, that differ from their defaults."""
        # A flag with its default value counts as not given, so that it can undo the one of a recipe.
        return [flag(name) for name in names if getattr(self, name) != getattr(type(self), name)]

    def normalisation(self, channels: int, evaluates: bool) -> str:
        """Name of the normalisation constants.

        Args:
            evaluates: with --evaluate-only. A training evaluates with the constants of its training data.
        """
        if self.normalize_images is not None:
            return self.normalize_images
        path = self.data_path
        if evaluates and self.valid_data_path is not None:
            path = self.valid_data_path
        if path == SAMPLE:
            return "digits"
        # Published constants are for colour images.
        return AUGMENTATIONS[self.augment].normalisation if channels == 3 else "generic"

    @property
    def image_recipe(self) -> ImageRecipe:
        """Changes of images beside `augment`. Raises ValueError for an unknown `rand_augment`."""
        changes: dict[str, Any] = {}
        if self.rand_augment:
            name, _, operations = self.rand_augment.partition(":")
            changes["rand_augment"] = parse_rand_augment(name, operations or None)
        return ImageRecipe(self.crop_scale, erasing=self.random_erasing, **changes)

    @property
    def is_in_python(self) -> bool:
        """Whether the samples come from data sets given to `megasnn.pretrain`."""
        return self.data_path.startswith(IN_PYTHON)

    def with_datasets(self, train: str, valid: str | None) -> DataConfig:
        """This configuration with data sets in Python, by title.

        Raises:
            ConfigError: flags that choose or change samples of files.
        """
        chosen = []
        for name in PATHS:
            path = getattr(self, name)
            if path != getattr(type(self), name) and not path.startswith(IN_PYTHON):
                chosen.append(flag(name))
        problems = []
        if chosen:
            problems.append(f"{', '.join(chosen)}: the samples come from {train} in Python; leave it out")
        of_files = [name for name in CHANGES if not name.startswith(MIXING)]
        if changing := self.changed("augment", *of_files, "split_by", "max_sample_mb", "tokenizer"):
            problems.append(
                f"{', '.join(changing)}: for samples of files, and {train} makes its own in Python: leave it out "
                "(over a recipe, give the default) and put the change into the data set's transform"
            )
        if problems:
            raise ConfigError(problems)
        valid_path = None if valid is None else f"{IN_PYTHON}{valid}"
        return replace(self, data_path=f"{IN_PYTHON}{train}", valid_data_path=valid_path)

    def problems(self) -> list[str]:
        """Contradictions, with values and flags."""
        return refusal(lambda: self.image_recipe)
