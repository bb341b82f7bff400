"""Trains a model of the table by its name: `torchrun -m megasnn sew_resnet --train-iters 100 ...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megasnn.models.table import MODELS
from megasnn.pretraining import pretrain


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status of the run; 2 without a model's name. By default it reads the command line."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] not in MODELS:
        given = f"unknown model {argv[0]!r}; " if argv and not argv[0].startswith("-") else ""
        sys.stderr.write(
            f"{given}usage: python -m megasnn {{{','.join(MODELS)}}} [flags]; --help after it lists them. A model of "
            "your own has a script that ends with megasnn.pretrain(YourModel), or an entry in megasnn/models/table.py\n"
        )
        return 0 if argv in (["--help"], ["-h"]) else 2
    return pretrain(argv[0], argv[1:])


if __name__ == "__main__":
    sys.exit(main())
