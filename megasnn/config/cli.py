"""The command line, generated from the dataclasses: Megatron's names, help from the fields' texts.

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
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from megasnn.common.files import in_message, unique
from megasnn.config.checks import ConfigError, flag, help_texts, registry_of, shown_value
from megasnn.config.data import PATHS, names_command
from megasnn.config.values import ABOUT, from_dict

_Config = TypeVar("_Config")
ORDER = ("model", "data", "training", "optimizer", "parallel", "checkpoint", "logging", "neuron")
"""Parts as --help shows them."""
Values = Mapping[str, Mapping[str, Any]]
"""Values of fields by part and name, as `to_dict` gives them; not all of them need to be there."""
_ADVICE = "correct the file, or give one that a run of this model wrote"


def parse(
    config_class: type[_Config],
    argv: Sequence[str],
    console_outputs: bool = True,
    recipes: Mapping[str, Path] = MappingProxyType({}),
    saved: Values = MappingProxyType({}),
) -> _Config:
    """Reads a command line: defaults, then values of a checkpoint, a file or recipe, flags; later ones win.

    Each value is of its field's type and within its bounds; `validate` looks at what is between them.

    Args:
        config_class: composes the parts; every field is a dataclass.
        argv: without the program's name.
        console_outputs: False keeps all ranks but one from printing the help.
        recipes: files that `--config` takes by a name.
        saved: values that count where neither a flag nor the file of `--config` gives one.
    Raises:
        SystemExit: after the help.
        ConfigError: unknown flags, wrong values, a file that cannot be read or is none of this configuration, paths of
            which the shell has made several words.
    """
    plain: Any = config_class()
    arguments, unknown = _parser(plain, recipes).parse_known_args(argv)
    values = merged_values(config_class, arguments, recipes, saved)
    if arguments.help:
        if console_outputs:
            _parser(from_dict(config_class, values), recipes).print_help()
        raise SystemExit(0)
    if unknown:
        raise ConfigError(_unknown_flags(config_class, unknown))
    for name in map(flag, PATHS):  # as a shell makes them of braces; the last one would win
        if any(first.startswith(f"{name}=") and second.startswith(f"{name}=") for first, second in pairwise(argv)):
            raise ConfigError(
                [f'{name} takes one value, and there are several: put it in quotes, {name} "a-{{0..9}}.tar"']
            )
    for part in ORDER:
        kind = type(getattr(plain, part))
        hints, names = get_type_hints(kind, include_extras=True), [each.name for each in fields(kind)]
        flags = {name: _read(hints[name], getattr(arguments, name)) for name in names if hasattr(arguments, name)}
        values[part] = {**values.get(part, {}), **flags}
    return from_dict(config_class, values, texts=True)


def flag_names(config_class: type[Any]) -> dict[str, tuple[str, ...]]:
    """Fields of each part that are flags, in the order of --help."""
    plain = config_class()
    return {name: tuple(each.name for each in fields(getattr(plain, name))) for name in ORDER}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError([message.removeprefix("argument ")])


def _parser(defaults: Any, recipes: Iterable[str]) -> _Parser:
    """A reader of flags, which gives those that stand in the command line, as texts."""
    parser = _Parser(usage="%(prog)s [flags]", description=type(defaults).__doc__, add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true", help="Show this text and end.")
    text = "File to take values from, over which flags win: config.json of a run, or some of what stands in one"
    if names := ", ".join(recipes):
        text += f"; or the name of a recipe: {names}"
    parser.add_argument("--config", metavar="FILE", help=f"{text}.")
    for part in ORDER:
        values = getattr(defaults, part)
        kind: Any = type(values)
        group = parser.add_argument_group(f"{part} options", kind.__doc__)
        texts, hints = help_texts(kind), get_type_hints(kind, include_extras=True)
        for entry in fields(values):
            hint, value = hints[entry.name], shown_value(getattr(values, entry.name))
            text = f"{texts.get(entry.name, '')}{_summaries(hint)} (default: {value})".replace("%", "%%")
            options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
            if _members(hint) == (bool,):
                group.add_argument(flag(entry.name), action=argparse.BooleanOptionalAction, **options)
            else:
                group.add_argument(flag(entry.name), metavar=_metavar(hint), **options)
    return parser


def _unknown_flags(config_class: type[Any], unknown: Sequence[str]) -> list[str]:
    """Sentences on words that no flag has taken."""
    known = [flag(name) for names in flag_names(config_class).values() for name in names]
    flags = []
    for word in unknown:
        if word.startswith("--"):
            near = get_close_matches(word := word.partition("=")[0], known, 1, 0.75)
            flags.append(f"unknown flag {word}" + "".join(f"; is it {each}?" for each in near))
    return flags or [f"{unknown[0]!r} belongs to no flag; a path with braces or stars stands in quotes"]


def _read(hint: Any, text: Any) -> Any:
    """None and numbers of a choice, as pydantic wants them; all other texts it reads itself."""
    members = _members(hint)
    if isinstance(text, str) and NoneType in members and text.lower() == "none":
        return None
    choices = {
        str(choice): choice for member in members if get_origin(member) is Literal for choice in get_args(member)
    }
    return choices.get(text, text)


def _members(hint: Any) -> tuple[Any, ...]:
    """Types that a union allows, without annotations; of another type, the type itself."""
    if get_origin(hint) is Annotated:
        return _members(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return tuple(each for member in get_args(hint) for each in _members(member))
    return (hint,)


def _metavar(hint: Any) -> str:
    if (registry := registry_of(hint)) is not None:
        return "{" + ",".join(registry.choices) + "}"
    member = next(each for each in _members(hint) if each is not NoneType)
    choices = [str(choice) for choice in get_args(member)]
    return "{" + ",".join(choices) + "}" if choices else member.__name__.upper()


def _summaries(hint: Any) -> str:
    """Summaries of the names of a registry, for the help."""
    entries = (registry_of(hint) or {}).items()
    return "".join(f" {name}: {each.summary}." for name, each in entries if getattr(each, "summary", ""))


def merged_values(
    config_class: type[Any], arguments: argparse.Namespace, recipes: Mapping[str, Path], saved: Values
) -> dict[str, dict[str, Any]]:
    """Values beside the flags: of a checkpoint, then of the file; later ones win.

    With `--evaluate-only` the file's checkpoints and logs do not count: they need not be taken back.

    Args:
        arguments: texts of the flags that were given.
        recipes: files that `--config` takes by a name.
        saved: values of the checkpoint of `--load`.
    Raises:
        ConfigError: the file cannot be read, or is no configuration of this class.
    """
    values = {part: dict(of_part) for part, of_part in saved.items()}
    if arguments.config is not None and arguments.config.lower() != "none":
        found = _read_value_file(config_class, arguments.config, recipes)
        _refuse_commands(found, arguments)
        if getattr(arguments, "evaluate_only", False):
            found = {part: of_part for part, of_part in found.items() if part not in ("checkpoint", "logging")}
            # null was written by a run that had not been told: then the checkpoint says how samples are made
            found["data"] = {name: value for name, value in found.get("data", {}).items() if value is not None}
        for part, of_part in found.items():
            values.setdefault(part, {}).update(of_part)
    return values


def _read_value_file(config_class: type[Any], name: str, recipes: Mapping[str, Path]) -> dict[str, Any]:
    """Values in a file, all of them fields of this configuration, and of this model where it names one."""
    path = recipes.get(name, Path(name))
    try:
        if not path.is_file():
            raise ConfigError(
                [f"neither a file nor the name of a recipe of this model ({', '.join(recipes) or 'none'})"]
            )
        # Takes names of files that are not UTF-8, as pydantic does not.
        values = json.loads(path.read_bytes(), object_pairs_hook=unique)
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


def _refuse_commands(values: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Raises ConfigError where a file names a command to be run, unless a flag replaces it: files are strangers'."""
    for name in PATHS:
        paths = values.get("data", {}).get(name) or ""
        if not hasattr(arguments, name) and names_command(paths):
            raise ConfigError(
                [
                    f"--config {in_message(arguments.config)}: data.{name} is {in_message(paths)}, a command that "
                    f"would be run; only the command line may give one: {flag(name)}"
                ]
            )
