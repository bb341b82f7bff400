"""Where samples come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megasnn.config.checks import at_least


@dataclass(frozen=True)
class DataConfig:
    """The order of samples depends on the seed only, never on the layout or the number of workers."""

    data_path: str = "sample"
    """Training shards, "dir/train-{00000..00009}.tar" (also .tar.gz); "sample" is scikit-learn's bundled
    digits."""
    valid_data_path: str | None = None
    """Validation shards; with --data-path sample, its held-out part by default."""
    shuffle: bool = True
    """Shuffle every epoch; --no-shuffle keeps the order of the files."""
    num_workers: int = 1
    """Threads of a rank that read ahead; 0 reads in the training thread."""
    augment: Literal["none", "cifar"] = "none"
    """cifar: random crop and flip, the same for a sample on any layout."""
    skip_broken_samples: bool = False
    """Count samples that cannot be read and go on, instead of stopping."""

    def problems(self) -> list[str]:
        wrong = at_least(self, 0, "num_workers")
        wrong += [
            f"{name} is empty; give shards or leave it out"
            for name, path in (("--data-path", self.data_path), ("--valid-data-path", self.valid_data_path))
            if path is not None and not path.strip()
        ]
        return wrong
