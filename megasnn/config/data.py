"""Where samples come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megasnn.augment import AUGMENTATIONS
from megasnn.config.checks import at_least
from megasnn.config.names import name_in
from megasnn.files.sample_size import SAMPLE_MB


@dataclass(frozen=True)
class DataConfig:
    """The order of samples depends on the seed only, never on the layout or the number of workers."""

    data_path: str = "sample"
    """Training shards, "dir/train-{00000..00009}.tar" (also .tar.gz); "sample" is scikit-learn's bundled digits, for
    models of event frames as recordings of a simulated event camera."""
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
    max_unpacked_gb: float | None = None
    """Gigabytes that a .tar.gz shard may unpack to; 100 times its own size by default."""

    def problems(self) -> list[str]:
        wrong = at_least(self, 0, "num_workers") + at_least(self, 1, "frame_duration", "max_sample_mb")
        if self.max_unpacked_gb is not None and not self.max_unpacked_gb > 0:
            wrong.append(f"--max-unpacked-gb must be above 0, got {self.max_unpacked_gb}")
        if self.frame_duration is not None and self.split_by is not None:
            wrong.append(f"--split-by {self.split_by} and --frame-duration {self.frame_duration} exclude each other")
        wrong += [
            f"{name} is empty; give shards or leave it out"
            for name, path in (("--data-path", self.data_path), ("--valid-data-path", self.valid_data_path))
            if path is not None and not path.strip()
        ]
        return wrong
