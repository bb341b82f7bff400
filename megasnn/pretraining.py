"""A run from a command line: what the pretrain scripts do."""

from __future__ import annotations

from collections.abc import Sequence

from megasnn.config import PretrainConfig
from megasnn.models.table import MODELS
from megasnn.process.launch import launch


def pretrain(model: str, argv: Sequence[str]) -> int:
    """Trains a model as the flags say; the exit status (see `megasnn.training.run`), 2 for wrong flags.

    Args:
        model: name of the model in the table (megasnn/models/table.py).
        argv: flags, without the program's name.
    Raises:
        ValueError: the table does not know the model.
        SystemExit: after the help.
    """
    entry = MODELS[model]

    def train(config: PretrainConfig) -> int:
        from megasnn import training  # torch, once the flags are right

        return training.run(config, entry)

    return launch(entry.config, train, argv, entry.recipes)
