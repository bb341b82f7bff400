"""Values of a run that no flag gives: of a checkpoint, the file of `--config`, the variant of `--variant`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from megasnn.config.checks import ConfigError, flag
from megasnn.config.data import PATHS
from megasnn.config.values import ABOUT, from_dict
from megasnn.files import DescriptionError, FreeForm, described, in_message

Values = Mapping[str, Mapping[str, Any]]
"""Values of fields by part and name, as `to_dict` gives them; not all of them need to be there."""
_LARGEST = 1 << 20
_ADVICE = "correct the file, or give one that a run of this model wrote"
_ABSENT = "(not given)"


def values_of(
    config_class: type[Any], argv: Sequence[str], recipes: Mapping[str, Path], saved: Values
) -> dict[str, dict[str, Any]]:
    """Values beside the flags: of a checkpoint, then of the file, then of the variant; later ones win.

    With `--evaluate-only` the file's checkpoints and logs do not count: they need not be taken back.

    Args:
        recipes: files that `--config` takes by a name.
        saved: values of the checkpoint of `--load`.
    Raises:
        ConfigError: the file cannot be read, or is no configuration of this class.
    """
    early = early_flags(argv)
    values = {part: dict(given) for part, given in saved.items()}
    if early.config is not None:
        given = _read(config_class, early.config, recipes)
        _refuse_commands(given, early)
        if "variant" in given.get("model", {}):
            given["model"] = {**_dimensions(config_class, given["model"]["variant"]), **given["model"]}
        if early.evaluate_only:
            given = {part: of_part for part, of_part in given.items() if part not in ("checkpoint", "logging")}
            # null was written by a run that had not been told: then the checkpoint says how samples are made
            given["data"] = {name: value for name, value in given.get("data", {}).items() if value is not None}
        for part, of_part in given.items():
            values.setdefault(part, {}).update(of_part)
    if early.variant != _ABSENT:
        variant = None if _is_none(early.variant) else early.variant
        values.setdefault("model", {}).update(_dimensions(config_class, variant))
    return values


def early_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Flags that change the defaults of all others, before those are read."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config", nargs="?")
    early.add_argument("--variant", nargs="?", default=_ABSENT)
    for name in PATHS:
        early.add_argument(flag(name), f"--{name}", nargs="?")
    early.add_argument("--evaluate-only", "--evaluate_only", action=argparse.BooleanOptionalAction)
    flags = early.parse_known_args(list(argv))[0]
    flags.config = None if _is_none(flags.config) else flags.config
    return flags


def _is_none(text: str | None) -> bool:
    return text is None or text.lower() == "none"


def _read(config_class: type[Any], name: str, recipes: Mapping[str, Path]) -> dict[str, Any]:
    """Values in a file, all of them fields of this configuration, and of this model where it names one."""
    path = recipes.get(name, Path(name))
    shown = in_message(str(path))
    try:
        if not path.is_file():
            raise ConfigError(
                [f"neither a file nor the name of a recipe of this model ({', '.join(recipes) or 'none'})"]
            )
        if path.stat().st_size > _LARGEST:
            raise ConfigError([f"{path.stat().st_size} bytes, up to {_LARGEST} are read"])
        values = described(dict[str, FreeForm], path.read_bytes(), shown, advice=_ADVICE)
        mine = config_class().model.name
        if (named := values.pop(ABOUT, {}).get("model", mine)) != mine:
            raise ConfigError([f"{ABOUT}.model is {in_message(named)}, and this is {mine}"])
        from_dict(config_class, values)
    except DescriptionError as error:
        raise ConfigError([f"--config {error}"]) from None
    except ConfigError as error:
        raise ConfigError(f"--config {shown}: {problem}; {_ADVICE}" for problem in error.problems) from None
    except (OSError, ValueError) as error:  # ValueError: a name with a zero in it
        raise ConfigError([f"--config {shown} cannot be read: {error}"]) from None
    return values


def _refuse_commands(values: dict[str, Any], early: argparse.Namespace) -> None:
    """Raises ConfigError where a file names a command to be run, unless a flag replaces it: files are strangers'."""
    for name in PATHS:
        paths = values.get("data", {}).get(name) or ""
        if getattr(early, name) is None and any(part.startswith("pipe:") for part in paths.split("::")):
            raise ConfigError(
                [
                    f"--config {in_message(early.config)}: data.{name} is {in_message(paths)}, a command that would be "
                    f"run; only the command line may give one: {flag(name)}"
                ]
            )


def _dimensions(config_class: type[Any], variant: str | None) -> dict[str, Any]:
    """A variant and its dimensions; none where the model has no such variant, which the flags' reader reports."""
    plain = config_class().model
    try:
        made = type(plain)(variant=variant)
    except (TypeError, ValueError):
        return {}
    names = [each.name for each in fields(plain) if each.default is None and getattr(plain, each.name) is not None]
    return {"variant": variant, **{name: getattr(made, name) for name in names}}
