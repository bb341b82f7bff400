"""Values of a run that no flag gives: of a checkpoint, the file of `--config`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megasnn.config.checks import ConfigError, flag
from megasnn.config.data import PATHS
from megasnn.config.values import ABOUT, from_dict
from megasnn.files import in_message

Values = Mapping[str, Mapping[str, Any]]
"""Values of fields by part and name, as `to_dict` gives them; not all of them need to be there."""
_ADVICE = "correct the file, or give one that a run of this model wrote"


def values_of(
    config_class: type[Any], given: argparse.Namespace, recipes: Mapping[str, Path], saved: Values
) -> dict[str, dict[str, Any]]:
    """Values beside the flags: of a checkpoint, then of the file; later ones win.

    With `--evaluate-only` the file's checkpoints and logs do not count: they need not be taken back.

    Args:
        given: texts of the flags that were given.
        recipes: files that `--config` takes by a name.
        saved: values of the checkpoint of `--load`.
    Raises:
        ConfigError: the file cannot be read, or is no configuration of this class.
    """
    values = {part: dict(of_part) for part, of_part in saved.items()}
    if given.config is not None and given.config.lower() != "none":
        found = _read(config_class, given.config, recipes)
        _refuse_commands(found, given)
        if getattr(given, "evaluate_only", False):
            found = {part: of_part for part, of_part in found.items() if part not in ("checkpoint", "logging")}
            # null was written by a run that had not been told: then the checkpoint says how samples are made
            found["data"] = {name: value for name, value in found.get("data", {}).items() if value is not None}
        for part, of_part in found.items():
            values.setdefault(part, {}).update(of_part)
    return values


def _read(config_class: type[Any], name: str, recipes: Mapping[str, Path]) -> dict[str, Any]:
    """Values in a file, all of them fields of this configuration, and of this model where it names one."""
    path = recipes.get(name, Path(name))
    try:
        if not path.is_file():
            raise ConfigError(
                [f"neither a file nor the name of a recipe of this model ({', '.join(recipes) or 'none'})"]
            )
        values = json.loads(path.read_bytes())  # takes names of files that are not UTF-8, as pydantic does not
        mine, about = config_class().model.name, values.pop(ABOUT, {}) if isinstance(values, dict) else None
        if not isinstance(about, dict):
            raise ConfigError(["it should hold a dictionary for each part, as config.json of a run does"])
        if about.get("model", mine) != mine:
            raise ConfigError([f"{ABOUT}.model is {in_message(about['model'])}, and this is {mine}"])
        from_dict(config_class, values)
    except ConfigError as error:
        raise ConfigError(
            f"--config {in_message(str(path))}: {problem}; {_ADVICE}" for problem in error.problems
        ) from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: a name with a zero in it, or no JSON
        raise ConfigError([f"--config {in_message(str(path))} cannot be read: {error}; {_ADVICE}"]) from None
    return values


def _refuse_commands(values: dict[str, Any], given: argparse.Namespace) -> None:
    """Raises ConfigError where a file names a command to be run, unless a flag replaces it: files are strangers'."""
    for name in PATHS:
        paths = values.get("data", {}).get(name) or ""
        if not hasattr(given, name) and any(part.startswith("pipe:") for part in paths.split("::")):
            raise ConfigError(
                [
                    f"--config {in_message(given.config)}: data.{name} is {in_message(paths)}, a command that would be "
                    f"run; only the command line may give one: {flag(name)}"
                ]
            )
