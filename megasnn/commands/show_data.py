"""Draw samples of shards into a PNG: images, or the frames of event recordings in two colours.

    megasnn-show-data "SHARDS/train-*.tar" --output samples.png
    megasnn-show-data "SHARDS/train-{00000..00017}.tar" --output samples.png --samples 4 --time-steps 10

Red is where it became brighter, blue where darker. The frames of a sample go from left to right, with its key and class
above.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray
from PIL import Image

from megasnn.augment import Key
from megasnn.config.tool_flags import run_tool
from megasnn.data.dataset import ShardDataset
from megasnn.data.datasets import open_shards
from megasnn.data.formats import SampleFormat, decode_events
from megasnn.data.images import open_image
from megasnn.data.paths import expand_shards
from megasnn.events import FrameOptions, make_frames
from megasnn.files import SAMPLE_LIMIT, SAMPLE_MB
from megasnn.telemetry.pictures import sample_sheet

_ANY_CLASS = 2**31
_ZIP = b"PK"  # an .npz is one


@dataclass(frozen=True)
class AsStored(SampleFormat):
    """Images in their own size, frames as they are; of events, `time_steps` frames of equal numbers of events."""

    time_steps: int
    kind, suffixes = "samples", ()

    def decode(self, data: bytes, key: Key | None = None) -> NDArray[Any]:
        """uint8 `[H, W, C]` or frames `[T, 2, H, W]`. Raises ValueError for damaged bytes."""
        if data.startswith(_ZIP):
            sample = decode_events(data)
            return sample if isinstance(sample, np.ndarray) else make_frames(sample, FrameOptions(self.time_steps))
        image = open_image(data)
        try:
            return np.asarray(image.convert("L" if image.mode == "L" else "RGB"))
        except (OSError, SyntaxError) as error:  # what damaged bytes make Pillow raise
            raise ValueError(str(error)) from error


def show(
    shards: tyro.conf.Positional[str],
    output: Annotated[Path, tyro.conf.arg(metavar="PNG")],
    samples: int = 8,
    time_steps: int = 10,
    max_sample_mb: int = SAMPLE_MB,
) -> None:
    """Draws samples.

    Args:
        shards: What --data-path takes: a shard, braces or a glob.
        output: The picture to write.
        samples: How many are drawn, spread over all of them.
        time_steps: Frames that are made of a recording where the shards hold events.
        max_sample_mb: Refuse a sample that takes more megabytes, in its file or decoded.
    """
    if samples < 1:
        raise ValueError(f"--samples must be at least 1, got {samples}")
    os.environ[SAMPLE_LIMIT] = str(max_sample_mb)
    dataset = ShardDataset(open_shards(expand_shards(shards, "SHARDS")), AsStored(time_steps), _ANY_CLASS)
    chosen = range(0, len(dataset), -(-len(dataset) // samples))  # of all classes, which follow each other
    captions = [f"{dataset.key(sample)}   class {int(dataset.labels[sample])}" for sample in chosen]
    Image.fromarray(sample_sheet([dataset.sample(sample) for sample in chosen], captions)).save(output)
    print(f"{len(chosen)} samples drawn in {output}")


def main(arguments: Sequence[str] | None = None) -> int:
    return run_tool("show_data", lambda: tyro.cli(show, args=arguments, description=__doc__))


if __name__ == "__main__":
    sys.exit(main())
