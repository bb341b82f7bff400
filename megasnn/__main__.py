"""Trains a model by its name: `megasnn sew_resnet --train-iters 100 ...`.

On several ranks: `torchrun --standalone -m megasnn sew_resnet ...`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import megasnn
from megasnn.models.registry import MODELS
from megasnn.pretraining import pretrain

USAGE = (
    "usage: python -m megasnn {MODELS} [flags]; MODEL --help lists the flags, --version prints the version. "
    "For a model of your own, write a script that ends with megasnn.pretrain(YourModel), or add an entry to "
    "megasnn/models/registry.py\n"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains the model that the command line names. Returns the exit status: that of the run, or 2 without a model."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in MODELS:
        return pretrain(words[0], words[1:])
    if words == ["--version"]:
        print(f"megasnn {megasnn.__version__}")
        return 0
    usage = USAGE.replace("MODELS", ",".join(MODELS))
    if words in (["--help"], ["-h"]):
        print(usage, end="")
        return 0
    if words and not words[0].startswith("-"):
        usage = f"unknown model {words[0]!r}; {usage}"
    print(usage, end="", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
