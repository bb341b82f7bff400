"""Trains a model of the table by its name: `megasnn sew_resnet --train-iters 100 ...`.

On several ranks: `torchrun --standalone -m megasnn sew_resnet ...`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import megasnn

USAGE = (
    "usage: python -m megasnn {MODELS} [flags]; --help after it lists them, --version in its place "
    "tells the version. A model of your own has a script that ends with megasnn.pretrain(YourModel), or an entry in "
    "megasnn/models/registry.py\n"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status of the run; 2 without a model's name. By default it reads the command line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    from megasnn.models.registry import MODELS
    from megasnn.pretraining import pretrain

    usage = USAGE.replace("MODELS", ",".join(MODELS))
    if argv and argv[0] in MODELS:
        return pretrain(argv[0], argv[1:])
    if argv in (["--help"], ["-h"], ["--version"]):
        sys.stdout.write(f"megasnn {megasnn.__version__}\n" if argv == ["--version"] else usage)
        return 0
    given = f"unknown model {argv[0]!r}; " if argv and not argv[0].startswith("-") else ""
    sys.stderr.write(given + usage)
    return 2


if __name__ == "__main__":
    sys.exit(main())
