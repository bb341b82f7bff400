"""Draw samples of shards into a PNG: images, or the frames of event recordings in two colours.

    megasnn-show-data SHARDS --output samples.png
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
from megasnn.config.tool_flags import command_line
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


def read_samples(
    data_path: str, count: int, time_steps: int = 10, max_sample_mb: int = SAMPLE_MB
) -> tuple[list[NDArray[Any]], list[str]]:
    """Samples of shards, and a caption for each: its key and class.

    Args:
        data_path: as for training.
        count: at most so many, spread over all of them.
        time_steps: frames of a recording where the shards hold events.
        max_sample_mb: a sample that takes more, in its file or decoded, is refused.
    Raises:
        ValueError: a shard is missing, cut or empty, a sample cannot be decoded, or a number is below 1.
    """
    for flag, value in (("samples", count), ("time-steps", time_steps), ("max-sample-mb", max_sample_mb)):
        if value < 1:
            raise ValueError(f"--{flag} must be at least 1, got {value}")
    os.environ[SAMPLE_LIMIT] = str(max_sample_mb)
    shards = open_shards(expand_shards(data_path, "SHARDS"))
    dataset = ShardDataset(shards, AsStored(time_steps), _ANY_CLASS)
    chosen = range(0, len(dataset), -(-len(dataset) // count))  # of all classes, which follow each other
    captions = [f"{dataset.key(sample)}   class {int(dataset.labels[sample])}" for sample in chosen]
    return [dataset.sample(sample) for sample in chosen], captions


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0; 1 when the shards cannot be read or the picture not be written, after saying why on stderr."""
    return command_line(show, arguments, description=__doc__)


def show(
    shards: tyro.conf.Positional[str],
    output: Annotated[Path, tyro.conf.arg(metavar="PNG")],
    samples: int = 8,
    time_steps: int = 10,
    max_sample_mb: int = SAMPLE_MB,
) -> int:
    """Draws samples.

    Args:
        shards: What --data-path takes: a shard, braces or a glob.
        output: The picture to write.
        samples: How many are drawn.
        time_steps: Frames that are made of a recording where the shards hold events.
        max_sample_mb: Refuse a sample that takes more megabytes, in its file or decoded.
    """
    try:
        if output.suffix.lower() != ".png":
            raise ValueError(f"--output {output} must end in .png")
        arrays, captions = read_samples(shards, samples, time_steps, max_sample_mb)
        Image.fromarray(sample_sheet(arrays, captions)).save(output)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(arrays)} samples drawn in {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
