"""The command line, generated from the dataclasses: Megatron's names, help from the fields' docstrings.

Values without a flag come from the file of --config and from the checkpoint of --load.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from megasnn.common.files import in_message, unique
from megasnn.config.checks import ConfigError, flag, help_texts, registry_of, shown_value
from megasnn.config.data import PATHS, names_command
from megasnn.config.training import LENGTHS
from megasnn.config.values import ABOUT, Configuration, from_dict

ORDER = ("model", "data", "training", "optimizer", "parallel", "checkpoint", "logging", "neuron")
"""Parts in the order of --help."""
Values = Mapping[str, Mapping[str, Any]]
"""Values by part and name, as from `asdict`; parts and names may be missing."""
_ADVICE = "correct the file, or give one that a run of this model wrote"


def parse(
    config_class: type[Configuration],
    argv: Sequence[str],
    console_outputs: bool = True,
    recipes: Mapping[str, Path] = MappingProxyType({}),
    checkpoint_values: Values = MappingProxyType({}),
) -> Configuration:
    """Reads a command line. Values come from defaults, a checkpoint, a file or recipe, and flags; later ones win.

    Types and bounds of fields are checked here, contradictions between fields in `validate`.

    Args:
        config_class: composes the parts; every field is a dataclass.
        argv: without the program's name.
        console_outputs: False suppresses --help's text.
        recipes: files by their names for `--config`.
        checkpoint_values: values of a checkpoint.
    Raises:
        SystemExit: after the help.
        ConfigError: unknown flags, wrong values, an unreadable file or one for another model, a path expanded by
            the shell into several words.
    """
    plain: Any = config_class()
    # Unknown flags are collected here: the error names each with its nearest neighbour.
    arguments, unknown = _parser(plain, recipes).parse_known_args(argv)
    values = _file_values(config_class, arguments, recipes, checkpoint_values)
    if arguments.help:
        # Its defaults are those of this command line: a file's or a checkpoint's, if it names one.
        if console_outputs:
            _parser(from_dict(config_class, values), recipes).print_help()
        raise SystemExit(0)
    if unknown:
        raise ConfigError(_unknown_flags(config_class, unknown))
    _refuse_expanded_paths(argv)
    for part in ORDER:
        kind = type(getattr(plain, part))
        hints = get_type_hints(kind, include_extras=True)
        of_part = values.setdefault(part, {})
        for entry in fields(kind):
            if hasattr(arguments, entry.name):
                of_part[entry.name] = _read(hints[entry.name], getattr(arguments, entry.name))
    return from_dict(config_class, values, texts=True)


def flag_names(config_class: type[Any]) -> dict[str, tuple[str, ...]]:
    """Field names by part, in --help's order."""
    plain = config_class()
    return {name: tuple(each.name for each in fields(getattr(plain, name))) for name in ORDER}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse itself prints the whole usage and ends the process.
        raise ConfigError([message.removeprefix("argument ")])


def _parser(defaults: Any, recipes: Iterable[str]) -> _Parser:
    """A parser for all flags. Its result has only the given flags, as text."""
    # No abbreviations: a later flag would change their meaning in old scripts.
    parser = _Parser(usage="%(prog)s [flags]", description=type(defaults).__doc__, add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true", help="Show this text and end.")
    text = "File with values, overridden by flags: config.json of a run, or a part of one"
    if names := ", ".join(recipes):
        text += f"; or the name of a recipe: {names}"
    parser.add_argument("--config", metavar="FILE", help=f"{text}.")
    for part in ORDER:
        _add_flags(parser, part, getattr(defaults, part))
    return parser


def _add_flags(parser: _Parser, part: str, values: Any) -> None:
    """Adds one part's flags; the help shows `values` as defaults."""
    kind: Any = type(values)
    group = parser.add_argument_group(f"{part} options", kind.__doc__)
    texts = help_texts(kind)
    hints = get_type_hints(kind, include_extras=True)
    for entry in fields(values):
        hint = hints[entry.name]
        default = shown_value(getattr(values, entry.name))
        text = f"{texts.get(entry.name, '')}{_summaries(hint)} (default: {default})"
        if entry.name in getattr(kind, "unused", ()):
            # Still known, so that the model itself says why it is wrong.
            text = argparse.SUPPRESS
        # No defaults in the result: a file or a checkpoint gives the values that no flag gives. argparse expands % in a
        # help text.
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
        if _members(hint) == (bool,):
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = _metavar(hint)
        group.add_argument(flag(entry.name), **options)


def _unknown_flags(config_class: type[Any], unknown: Sequence[str]) -> list[str]:
    known: list[str] = []
    for names in flag_names(config_class).values():
        known += map(flag, names)
    problems = []
    for word in unknown:
        if word.startswith("--"):
            name = word.partition("=")[0]
            near = get_close_matches(name, known, 1, 0.75)
            problems.append(f"unknown flag {name}" + "".join(f"; is it {each}?" for each in near))
    return problems or [f"{unknown[0]!r} belongs to no flag; put a path with braces or stars in quotes"]


def _refuse_expanded_paths(argv: Sequence[str]) -> None:
    """Raises ConfigError for a path flag twice in a row: a shell has expanded its braces."""
    # argparse would silently take the last one.
    for name in map(flag, PATHS):
        for word, following in pairwise(argv):
            if word.startswith(f"{name}=") and following.startswith(f"{name}="):
                raise ConfigError(
                    [f'{name} takes one value and got several: put it in quotes, {name} "a-{{0..9}}.tar"']
                )


def _read(hint: Any, text: Any) -> Any:
    """Turns "none" into None and a choice into its value. pydantic reads all other texts."""
    members = _members(hint)
    if isinstance(text, str) and NoneType in members and text.lower() == "none":
        return None
    for member in members:
        if get_origin(member) is Literal:
            # pydantic does not convert text to a number in a Literal.
            for choice in get_args(member):
                if str(choice) == text:
                    return choice
    return text


def _members(hint: Any) -> tuple[Any, ...]:
    """A union's types without annotations; any other type itself."""
    if get_origin(hint) is Annotated:
        return _members(get_args(hint)[0])
    if get_origin(hint) not in (Union, UnionType):
        return (hint,)
    members: tuple[Any, ...] = ()
    for member in get_args(hint):
        members += _members(member)
    return members


def _metavar(hint: Any) -> str:
    registry = registry_of(hint)
    if registry is not None:
        return "{" + ",".join(registry.choices) + "}"
    member = next(each for each in _members(hint) if each is not NoneType)
    choices = [str(choice) for choice in get_args(member)]
    return "{" + ",".join(choices) + "}" if choices else member.__name__.upper()


def _summaries(hint: Any) -> str:
    """A registry's entries, for the help; "" without a registry."""
    entries = (registry_of(hint) or {}).items()
    return "".join(f" {name}: {each.summary}." for name, each in entries if getattr(each, "summary", ""))


def _file_values(
    config_class: type[Any], arguments: argparse.Namespace, recipes: Mapping[str, Path], checkpoint_values: Values
) -> dict[str, dict[str, Any]]:
    """Values beside the flags: of the checkpoint, overridden by the file of --config.

    Raises:
        ConfigError: the file cannot be read, or has other fields than this configuration.
    """
    values = {part: dict(of_part) for part, of_part in checkpoint_values.items()}
    if arguments.config is None or arguments.config.lower() == "none":
        return values
    found = _read_value_file(config_class, arguments.config, recipes)
    _refuse_commands(found, arguments)
    if getattr(arguments, "evaluate_only", False):
        # The file's checkpoint and log folders are the training's.
        found = {part: of_part for part, of_part in found.items() if part not in ("checkpoint", "logging")}
        # null stands for a default of the training; the checkpoint says how samples were made.
        found["data"] = {name: value for name, value in found.get("data", {}).items() if value is not None}
    for part, of_part in found.items():
        values.setdefault(part, {}).update(of_part)
    if any(getattr(arguments, name, "none").lower() != "none" for name in LENGTHS):
        # A run has one length: that of a flag replaces that of a recipe, whatever either counts.
        training = values.get("training", {})
        values["training"] = {name: value for name, value in training.items() if name not in LENGTHS}
    return values


def _read_value_file(config_class: type[Any], name: str, recipes: Mapping[str, Path]) -> dict[str, Any]:
    path = recipes.get(name, Path(name))
    shown = f"--config {in_message(str(path))}"
    try:
        if not path.is_file():
            names = ", ".join(recipes) or "none"
            raise ConfigError([f"neither a file nor the name of a recipe of this model ({names})"])
        # json accepts bytes in any encoding with a mark, and surrogates of file names that are not UTF-8.
        values = json.loads(path.read_bytes(), object_pairs_hook=unique)
        mine = config_class().model.name
        about = values.pop(ABOUT, {}) if isinstance(values, dict) else None
        if not isinstance(about, dict):
            raise ConfigError(["it must hold a dictionary for each part, as config.json of a run does"])
        if about.get("model", mine) != mine:
            raise ConfigError([f"{ABOUT}.model is {in_message(about['model'])}, and this is {mine}"])
        from_dict(config_class, values)
    except ConfigError as error:
        raise ConfigError(f"{shown}: {problem}; {_ADVICE}" for problem in error.problems) from None
    except (OSError, ValueError, RecursionError) as error:
        # ValueError: a name with a zero in it, or no JSON.
        raise ConfigError([f"{shown} cannot be read: {error}; {_ADVICE}"]) from None
    return values


def _refuse_commands(values: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Raises ConfigError for a command in a file, unless a flag replaces it."""
    # A file may come from a stranger, and a command in it would run here.
    for name in PATHS:
        path = values.get("data", {}).get(name) or ""
        if not hasattr(arguments, name) and names_command(path):
            raise ConfigError(
                [
                    f"--config {in_message(arguments.config)}: data.{name} is {in_message(path)}, a command that would "
                    f"run; only the command line may give one: {flag(name)}"
                ]
            )
