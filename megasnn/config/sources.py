"""Values of a run where no flag gives them: of a checkpoint, the file of `--config`, the variant of `--variant`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from megasnn.config.checks import ConfigError, flag
from megasnn.config.data import PATHS
from megasnn.config.values import ABOUT, as_flag, from_dict, to_dict
from megasnn.files import DescriptionError, FreeForm, described, in_message

Config = TypeVar("Config")
Values = Mapping[str, Mapping[str, Any]]
"""Values of fields by part and name, as `to_dict` gives them; not all of them need to be there."""

_ADVICE = "correct the file, or give one that a run of this model wrote"
_ABSENT = "(not given)"
_FLAGS = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)")


def sources_of(
    config_class: type[Any], argv: Sequence[str], recipes: Mapping[str, Path], saved: Values
) -> dict[str, Values]:
    """Values by what gives them, beside the flags. A later source replaces values of those before it.

    With `--evaluate-only` the file says nothing of checkpoints and logs: what a run was given need not be taken back.

    Args:
        recipes: files that `--config` takes by a name.
        saved: values of the checkpoint of `--load`.
    Raises:
        ConfigError: the file cannot be read, or holds what is no configuration of this class.
    """
    early = early_flags(argv)
    sources = {"--load": saved}
    if early.config is not None:
        given = _read(config_class, early.config, recipes)
        _refuse_commands(given, early)
        if "variant" in given.get("model", {}):
            given["model"] = {**_dimensions(config_class, given["model"]["variant"]), **given["model"]}
        if early.evaluate_only:
            given = {part: values for part, values in given.items() if part not in ("checkpoint", "logging")}
            # null was written by a run that had not been told: then the checkpoint says how samples are made
            given["data"] = {name: value for name, value in given.get("data", {}).items() if value is not None}
        sources[f"--config {in_message(early.config)}"] = given
    if early.variant != _ABSENT:
        variant = None if _is_none(early.variant) else early.variant
        sources[f"--variant {in_message(early.variant or '')}"] = {"model": _dimensions(config_class, variant)}
    return sources


def defaults_of(config_class: type[Config], sources: Mapping[str, Values]) -> Config:
    """Configuration without flags: the defaults, and over them the values of each source."""
    values: dict[str, dict[str, Any]] = {}
    for given in sources.values():
        values = {part: {**values.get(part, {}), **given.get(part, {})} for part in {**values, **given}}
    return from_dict(config_class, values)


def with_sources(problems: Iterable[str], config: Any, sources: Mapping[str, Values]) -> list[str]:
    """Problems of a configuration, each with the sources of the values that it names, where those are no flags."""
    values = {name: value for part in to_dict(config).values() for name, value in part.items()}
    given = {
        name: (source, value)
        for source, parts in sources.items()
        for part in parts.values()
        for name, value in part.items()
    }
    return [problem + _sources_of_problem(problem, values, given) for problem in problems]


def _sources_of_problem(problem: str, values: Mapping[str, Any], given: Mapping[str, tuple[str, Any]]) -> str:
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys(each.replace("-", "_") for each in _FLAGS.findall(problem)):
        source, value = given.get(name, ("", None))
        if value is not None and value == values.get(name):
            # A path may hold a password.
            found.setdefault(source, []).append(flag(name) if name in PATHS else in_message(as_flag(name, value)))
    texts = [f"{source} gives {' '.join(flags)}" for source, flags in found.items()]
    return f" ({'; '.join(texts)})" if texts else ""


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
        content = path.read_bytes()
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
