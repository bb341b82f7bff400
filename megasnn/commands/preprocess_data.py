"""Make webdataset shards for training from a data set as it is downloaded.

    megasnn-preprocess-data cifar10-dvs --input RECORDINGS --output SHARDS --time-steps 10 --size 48
    megasnn-preprocess-data n-mnist --input N-MNIST --output SHARDS --keep-events
    megasnn-preprocess-data image-folder --input imagenet --output SHARDS --samples-per-shard 2000
    megasnn-preprocess-data cifar10-dvs --help

The same input gives the same shards, for any number of processes. docs/data.md says more.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megasnn.config.tool_flags import command_line
from megasnn.preprocess.options import Command


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0; 1 when the data or the options cannot be used, after saying why on stderr; 130 when interrupted."""
    try:
        command = command_line(Command, arguments, description=__doc__)
        print(command.run())
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
