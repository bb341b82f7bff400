"""A run from a command line: what the pretrain scripts do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megasnn.checkpoint.choice import first_legible
from megasnn.config import CheckpointConfig, ConfigError, PretrainConfig, flags_between, from_dict, parse
from megasnn.config.defaults import Values
from megasnn.files.described import in_message
from megasnn.models.entry import ModelEntry
from megasnn.models.table import MODELS, saved_model_name
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

    return launch(lambda speaks: configuration(entry, argv, speaks), train)


def configuration(entry: ModelEntry[Any], argv: Sequence[str], console_outputs: bool = True) -> PretrainConfig:
    """The configuration of a run that trains this model, not yet validated; rank 0 says what it takes from --load.

    The checkpoint of --load gives the dimensions and the neuron that neither a flag nor the file of --config gives.

    Raises:
        as `parse`.
    """
    given = parse(entry.config, argv, console_outputs, entry.recipes)
    saved = _saved_model(entry, given.checkpoint)
    if not saved:
        return given
    config = parse(entry.config, argv, console_outputs, entry.recipes, saved)
    taken = flags_between(given, config)
    if taken and os.environ.get("RANK", "0") == "0":
        print(f"--load {in_message(given.checkpoint.load)} gives {' '.join(map(in_message, taken))}")
    return config


def _saved_model(entry: ModelEntry[Any], options: CheckpointConfig) -> Values:
    """Dimensions and neuron of the checkpoint to load; empty where it does not say them, or there is none of this
    model. What is wrong with a checkpoint is told when it is loaded."""
    try:
        found = first_legible(Path(options.load), options.ckpt_step) if options.load else None
    except OSError:  # a folder that may not be read, a name that is too long
        return {}
    if found is None or found.config is None or saved_model_name(found) not in (None, entry.name):
        return {}
    values: dict[str, Any] = {part: found.config.get(part) for part in ("model", "neuron")}
    try:
        from_dict(entry.config, values)
    except ConfigError:
        return {}
    return values
