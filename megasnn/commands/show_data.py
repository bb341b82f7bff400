"""Draw samples of shards into a PNG: images, or the frames of event recordings in two colours.

    megasnn-show-data SHARDS --output samples.png
    megasnn-show-data "SHARDS/train-{00000..00017}.tar" --output samples.png --samples 4 --time-steps 10

Red is where it became brighter, blue where darker. The frames of a sample go from left to right, with its key and class
above.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from PIL import Image

from megasnn.config.cli import command_line
from megasnn.data.show import read_samples
from megasnn.files.sample_size import SAMPLE_MB
from megasnn.telemetry.pictures import sample_sheet


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0; 1 when the shards cannot be read or the picture not be written, after saying why on stderr."""
    return command_line(show, arguments, description=__doc__)


def show(
    shards: tyro.conf.Positional[str],
    output: Annotated[Path, tyro.conf.arg(metavar="PNG")],
    samples: int = 8,
    seed: int | None = None,
    time_steps: int = 10,
    max_sample_mb: int = SAMPLE_MB,
) -> int:
    """Draws samples.

    Args:
        shards: What --data-path takes: a shard, a folder of them, braces or a glob.
        output: The picture to write.
        samples: How many are drawn.
        seed: Draw random ones; by default the first ones.
        time_steps: Frames that are made of a recording where the shards hold events.
        max_sample_mb: Refuse a sample that takes more megabytes, in its file or decoded.
    """
    try:
        if output.suffix.lower() != ".png":
            raise ValueError(f"--output {output} must end in .png")
        arrays, captions = read_samples(shards, samples, seed, time_steps, max_sample_mb)
        Image.fromarray(sample_sheet(arrays, captions)).save(output)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(arrays)} samples drawn in {output}")
    return 0


def program() -> int:
    """The program megasnn-show-data."""
    return main()


if __name__ == "__main__":
    sys.exit(program())
