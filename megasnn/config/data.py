"""Where samples come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from megasnn.augment import AUGMENTATIONS
from megasnn.augment.images import ImageRecipe
from megasnn.augment.rand_augment import parse_rand_augment
from megasnn.config.checks import FOR_ENGINES, above, at_least, flag, needs, refusal
from megasnn.config.names import name_in
from megasnn.files.sample_size import SAMPLE_MB

SAMPLE = "sample"
"""As a path it stands for scikit-learn's digits."""
PATHS = ("data_path", "valid_data_path")
"""Fields that name shards, or commands whose output is one."""
CHANGES = (
    *("crop_scale", "crop_ratio", "rand_augment", "rand_augment_ops", "color_jitter", "random_erasing"),
    *("random_erasing_mode", "normalize_images", "center_crop", "mixup_alpha", "cutmix_alpha", "mixup_off_epoch"),
)
"""Fields that say how samples are made and changed beside `augment`, all of them for images alone."""


@dataclass(frozen=True)
class DataConfig:
    """The order of samples depends on the seed only, never on the layout or the number of workers."""

    for_runs: ClassVar[bool] = True

    data_path: str = SAMPLE
    """Training shards, "dir/train-{00000..00009}.tar" (also .tar.gz), or a URL that webdataset opens (http, s3, gs, and
    pipe: before a command); "sample" is scikit-learn's bundled digits, for models of event frames as recordings of a
    simulated event camera."""
    valid_data_path: str | None = None
    """Validation shards; with --data-path sample, its held-out part by default."""
    shuffle: bool = True
    """Shuffle every epoch; --no-shuffle keeps the order of the files."""
    last_batch: Literal["continue", "drop", "keep"] = "continue"
    """Samples at the end of an epoch that fill no global batch: continue with the next epoch's, drop them (others each
    epoch), or keep them as a smaller batch."""
    num_workers: int = 1
    """Processes of a rank that read ahead; 0 reads in the training process."""
    augment: Annotated[str, name_in(AUGMENTATIONS)] = "none"
    """Random changes, the same for a sample on any layout."""
    crop_scale: float | None = None
    """With --augment crop, the least share of an image's area that is kept, 0.08 by default; 1 with --crop-ratio 1
    cuts nothing off a square."""
    crop_ratio: float | None = None
    """With --augment crop, the largest ratio of the longer side to the shorter one that is kept, 4/3 by default."""
    rand_augment: str | None = None
    """RandAugment on top, named as timm names it: rand-m9-mstd0.5-inc1."""
    rand_augment_ops: str | None = None
    """Of RandAugment: the operations to choose from, "rotate,shear-x", instead of all fifteen."""
    color_jitter: float | None = None
    """How far brightness, contrast and saturation change at random on top: 0.4 for factors from 0.6 to 1.4."""
    random_erasing: float | None = None
    """Share of the images of which a rectangle is replaced, after all other changes."""
    random_erasing_mode: Literal["pixel", "rand", "const"] | None = None
    """By normal numbers for each pixel (pixel, the default), one for each channel (rand), or the mean (const)."""
    normalize_images: Literal["generic", "cifar10", "imagenet", "digits"] | None = None
    """Constants by which images are normalised; by default those that go with --augment in colour, generic ones for
    grey images, and those of the digits for --data-path sample. An evaluation and --finetune take those of --load."""
    center_crop: float | None = None
    """Where the middle of an image is taken, in evaluation and without --augment crop: the share of its shorter side
    that is kept, all of it by default. 0.875 with --image-size 224 is what others call scaling to 256."""
    mixup_alpha: float | None = field(default=None, metadata=FOR_ENGINES)
    """Mix each image and its label with another one's of the micro-batch, by a share of the beta distribution of this
    parameter, drawn for each micro-batch."""
    cutmix_alpha: float | None = field(default=None, metadata=FOR_ENGINES)
    """Replace a rectangle of each image by another one's, whose area is such a share; with --mixup-alpha, each is done
    in half of the micro-batches."""
    mixup_off_epoch: int | None = None
    """Epochs after which neither --mixup-alpha nor --cutmix-alpha mixes any more."""
    split_by: Literal["number", "time"] | None = None
    """Where shards hold events: whether the frames of a recording have equal shares of its events (number, the
    default) or of its time."""
    frame_duration: int | None = None
    """Where shards hold events: microseconds of a frame, instead of equal shares. What comes after --time-steps frames
    is left out, what is missing is empty."""
    normalize_frames: Literal["none", "frame-max"] | None = None
    """Where shards hold events: frame-max divides each frame by its largest count; by default counts stay."""
    skip_broken_samples: bool = False
    """Count samples that cannot be read and go on, instead of stopping."""
    max_sample_mb: int = SAMPLE_MB
    """A sample that takes more megabytes, in its file or decoded, cannot be read."""
    fetch_timeout: float = 60.0
    """Seconds of silence after which a source of shards behind a URL, or the processes that read, are given up."""

    @property
    def mixes(self) -> bool:
        """Whether samples are mixed with each other, and labels are probabilities."""
        return self.mixup_alpha is not None or self.cutmix_alpha is not None

    @property
    def draws(self) -> bool:
        """Whether samples are changed at random."""
        others = (self.rand_augment, self.color_jitter, self.random_erasing)
        return self.augment != "none" or self.mixes or any(value is not None for value in others)

    def normalisation(self, channels: int, evaluates: bool) -> str:
        """The name of the constants by which images of so many channels are normalised: of those that are trained on,
        and of all that is evaluated meanwhile.

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
        """How images are changed beside what `augment` names. Raises ValueError for an unknown `rand_augment`."""
        text = self.rand_augment
        given: dict[str, Any] = {
            "crop_scale": self.crop_scale,
            "crop_ratio": self.crop_ratio,
            "rand_augment": None if text is None else parse_rand_augment(text, self.rand_augment_ops),
            "color_jitter": self.color_jitter,
            "erasing": self.random_erasing,
            "erasing_mode": self.random_erasing_mode,
        }
        return ImageRecipe(**{name: value for name, value in given.items() if value is not None})

    def problems(self) -> list[str]:
        wrong = at_least(self, 0, "num_workers") + at_least(self, 1, "frame_duration", "max_sample_mb")
        wrong += above(self, 0, "fetch_timeout") + self._change_problems()
        if self.frame_duration is not None and self.split_by is not None:
            wrong.append(f"--split-by {self.split_by} and --frame-duration {self.frame_duration} exclude each other")
        wrong += [
            f"{name} is empty; give shards or leave it out"
            for name, path in (("--data-path", self.data_path), ("--valid-data-path", self.valid_data_path))
            if path is not None and not path.strip()
        ]
        return wrong

    def _change_problems(self) -> list[str]:
        wrong = above(self, 0, "crop_scale", "color_jitter", "random_erasing", "mixup_alpha", "cutmix_alpha")
        wrong += above(self, 0, "center_crop")
        wrong += at_least(self, 1, "crop_ratio") + at_least(self, 0, "mixup_off_epoch")
        if self.mixup_off_epoch is not None and not self.mixes:
            wrong.append(f"--mixup-off-epoch {self.mixup_off_epoch} needs --mixup-alpha or --cutmix-alpha")
        wrong += [
            f"{flag(name)} must be at most 1, got {value}"
            for name in ("crop_scale", "random_erasing", "center_crop")
            if (value := getattr(self, name)) is not None and value > 1
        ]
        if not AUGMENTATIONS[self.augment].crops:
            wrong += [
                f"{flag(name)} {value} is for --augment crop, not {self.augment}"
                for name, value in (("crop_scale", self.crop_scale), ("crop_ratio", self.crop_ratio))
                if value is not None
            ]
        if self.rand_augment is not None:
            wrong += refusal(parse_rand_augment, self.rand_augment, self.rand_augment_ops)
        wrong += needs(self, "rand_augment", "rand_augment_ops")
        return wrong + needs(self, "random_erasing", "random_erasing_mode")
