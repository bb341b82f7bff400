"""What a configuration holds where no flag says it: the defaults of its classes, and over them the values of files."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from megasnn.config.checks import ConfigError, flag
from megasnn.config.serialise import ABOUT, from_dict
from megasnn.files.described import DescriptionError, FreeForm, described, in_message, open_regular, read_bounded

Config = TypeVar("Config")
Values = Mapping[str, Mapping[str, Any]]
"""Values of fields by part and name, as `to_dict` gives them; not all of them need to be there."""

LARGEST = 1 << 20
_ADVICE = "correct the file, or give one that a run of this model wrote"
_NOT_GIVEN = "(not given)"
_MAY_BE_COMMANDS = ("data_path", "valid_data_path")


def defaults_of(config_class: type[Config], argv: Sequence[str], recipes: Mapping[str, Path], saved: Values) -> Config:
    """The configuration without flags: the values of the file that `--config` names, and the dimensions of the variant
    that `--variant` names, which replace those of the file.

    Args:
        recipes: files that `--config` takes by a name.
        saved: values that the file of `--config`, its variant included, replaces.
    Raises:
        ConfigError: the file of `--config` cannot be read, or holds what is no configuration of this class.
    """
    flags = _early_flags(argv)
    plain = config_class()
    values: dict[str, Any] = dict(saved)
    if flags.config is not None:
        given = _read(config_class, flags.config, recipes)
        _refuse_commands(given, flags)
        if "variant" in given.get("model", {}):
            values = _with_variant(plain, values, given["model"]["variant"])
        values = {part: {**values.get(part, {}), **given.get(part, {})} for part in {**values, **given}}
    if flags.variant != _NOT_GIVEN:
        values = _with_variant(plain, values, None if _is_none(flags.variant) else flags.variant)
    return from_dict(config_class, dict(values))


def config_named(argv: Sequence[str]) -> str | None:
    """What `--config` names in a command line; None without it."""
    name: str | None = _early_flags(argv).config
    return name


def _early_flags(argv: Sequence[str]) -> argparse.Namespace:
    """The flags that change the defaults of all others, before those are read."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config", nargs="?")
    early.add_argument("--variant", nargs="?", default=_NOT_GIVEN)
    for name in _MAY_BE_COMMANDS:
        early.add_argument(flag(name), nargs="?")
    flags = early.parse_known_args(list(argv))[0]
    flags.config = None if _is_none(flags.config) else flags.config
    return flags


def _is_none(text: str | None) -> bool:
    return text is None or text.lower() == "none"


def _read(config_class: type[Any], name: str, recipes: Mapping[str, Path]) -> dict[str, Any]:
    """The values in a file, all of which are fields of this configuration, and of this model where it names one."""
    path = recipes.get(name, Path(name))
    shown = in_message(str(path))
    try:
        with open_regular(path) as stream:
            content = read_bounded(stream, shown, LARGEST)
        values = described(dict[str, FreeForm], content, shown, advice=_ADVICE)
        mine = config_class().model.name
        if (named := values.pop(ABOUT, {}).get("model", mine)) != mine:
            raise ConfigError([f"{ABOUT}.model is {in_message(named)}, and this is {mine}"])
        from_dict(config_class, values)
    except FileNotFoundError:
        known = ", ".join(recipes) or "none"
        raise ConfigError(
            [f"--config {in_message(name)} is neither a file nor the name of a recipe of this model; recipes: {known}"]
        ) from None
    except DescriptionError as error:
        raise ConfigError([f"--config {error}"]) from None
    except ConfigError as error:
        raise ConfigError(f"--config {shown}: {problem}; {_ADVICE}" for problem in error.problems) from None
    except (OSError, ValueError) as error:  # ValueError: a name with a zero in it
        raise ConfigError([f"--config {shown} cannot be read: {error}"]) from None
    return values


def _refuse_commands(values: dict[str, Any], flags: argparse.Namespace) -> None:
    """Raises ConfigError where a file names a command to be run, unless a flag replaces it: files are strangers'."""
    for name in _MAY_BE_COMMANDS:
        paths = values.get("data", {}).get(name) or ""
        if getattr(flags, name) is None and any(part.startswith("pipe:") for part in paths.split("::")):
            raise ConfigError(
                [
                    f"--config {in_message(flags.config)}: data.{name} is {in_message(paths)}, a command that would be "
                    f"run; only the command line may give one: {flag(name)}"
                ]
            )


def _with_variant(plain: Any, values: dict[str, Any], variant: str | None) -> dict[str, Any]:
    """Values in which the dimensions are those of a variant; unchanged where the model has no such variant, which the
    reader of all flags then reports."""
    model = type(plain.model)
    try:
        model(variant=variant)
    except (TypeError, ValueError):
        return values
    given_by_variant = {
        entry.name for entry in fields(model) if entry.default is None and getattr(plain.model, entry.name) is not None
    }
    kept = {name: value for name, value in values.get("model", {}).items() if name not in given_by_variant}
    return {**values, "model": {**kept, "variant": variant}}
