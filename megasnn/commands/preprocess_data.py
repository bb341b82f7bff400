"""Make webdataset shards for training from a downloaded data set, or token files from text.

    megasnn-preprocess-data cifar10-dvs --input RECORDINGS --output SHARDS --time-steps 10 --size 48
    megasnn-preprocess-data n-mnist --input N-MNIST --output SHARDS --keep-events
    megasnn-preprocess-data image-folder --input imagenet --output SHARDS --samples-per-shard 2000
    megasnn-preprocess-data text --input TEXTS --output TOKENS --valid-share 0.05
    megasnn-preprocess-data cifar10-dvs --help

The same input gives the same files for any number of worker processes. docs/data.md has the details.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import tyro

from megasnn.commands.flags import run_tool
from megasnn.data.preprocess.options import Command


def main(arguments: Sequence[str] | None = None) -> int:
    def preprocess() -> None:
        command = tyro.cli(Command, args=arguments, description=__doc__)
        print(command.run())

    return run_tool("preprocess_data", preprocess)


if __name__ == "__main__":
    sys.exit(main())
