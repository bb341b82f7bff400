"""The command line, generated from the dataclasses: Megatron's names, help from the fields' texts."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import field, fields, make_dataclass
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

from megasnn.config.checks import ConfigError, flag
from megasnn.config.data import PATHS
from megasnn.config.fields import help_texts, registry_of
from megasnn.config.sources import Values, values_of
from megasnn.config.values import from_dict, shown

Config = TypeVar("Config")
Result = TypeVar("Result")
ORDER = ("model", "data", "training", "optimizer", "parallel", "checkpoint", "logging", "neuron")
"""Parts as --help shows them."""


def parse(
    config_class: type[Config],
    argv: Sequence[str],
    console_outputs: bool = True,
    recipes: Mapping[str, Path] = MappingProxyType({}),
    saved: Values = MappingProxyType({}),
) -> Config:
    """Reads a command line: defaults, then values of a checkpoint, a file or recipe, a variant, flags; later ones win.

    Each value is of its field's type and within its bounds; `validate` looks at what is between them.

    Args:
        config_class: composes the parts; every field is a dataclass.
        argv: without the program's name.
        console_outputs: False keeps all ranks but one from printing the help or the error.
        recipes: files that `--config` takes by a name.
        saved: values that count where neither a flag nor the file of `--config` gives one.
    Raises:
        SystemExit: 0 after the help, 2 for flags that lack a value.
        ConfigError: unknown flags, wrong values, a file that cannot be read or is none of this configuration, paths of
            which the shell has made several words.
    """
    defaults = from_dict(config_class, values_of(config_class, argv, recipes, saved))
    for name in map(flag, PATHS):  # as a shell makes them of braces; the last one would win
        if any(first.startswith(f"{name}=") and second.startswith(f"{name}=") for first, second in pairwise(argv)):
            raise ConfigError(
                [f'{name} takes one value, and there are several: put it in quotes, {name} "a-{{0..9}}.tar"']
            )
    with ExitStack() as stack:
        if not console_outputs:  # tyro's own option lets some errors through
            silence = io.StringIO()
            stack.enter_context(redirect_stdout(silence))
            stack.enter_context(redirect_stderr(silence))
        options: dict[str, Any] = {"config": (tyro.conf.OmitArgPrefixes,), "return_unknown_args": True}
        given, unknown = command_line(_groups(defaults, recipes), argv, **options)
    values = {}
    for name in ORDER:
        hints = get_type_hints(type(getattr(defaults, name)), include_extras=True)
        values[name] = {entry: _read(hints[entry], value) for entry, value in vars(getattr(given, name)).items()}
    if unknown:
        known = [flag(name) for part in values.values() for name in part]
        flags = []
        for word in unknown:
            if word.startswith("--"):
                near = get_close_matches(word := word.partition("=")[0].replace("_", "-"), known, 1, 0.75)
                flags.append(f"unknown flag {word}" + "".join(f"; is it {each}?" for each in near))
        stray = f"{unknown[0]!r} belongs to no flag; a path with braces or stars stands in quotes"
        raise ConfigError(flags or [stray])
    return from_dict(config_class, values, texts=True)


def flag_names(config_class: type[Any]) -> dict[str, tuple[str, ...]]:
    """Fields of each part that are flags, in the order of --help."""
    plain = config_class()
    return {name: tuple(each.name for each in fields(getattr(plain, name))) for name in ORDER}


def command_line(of: Any, argv: Sequence[str] | None, **options: Any) -> Any:
    """Reads the flags of a tool, a dataclass or the arguments of a function. Raises SystemExit as tyro does."""
    return tyro.cli(of, args=argv, **options)


def subcommands(commands: dict[str, Callable[..., Result]], argv: Sequence[str] | None, description: str) -> Result:
    """Runs one of the functions, by its name on the command line. Raises SystemExit as tyro does."""
    return tyro.extras.subcommand_cli_from_dict(commands, description=description, args=argv)


def _groups(defaults: Any, recipes: Iterable[str]) -> type:
    """A dataclass with a field for each part, whose fields are texts: pydantic reads them as it reads files."""
    text = "File to take values from: config.json of a run, or some of what stands in one"
    if names := ", ".join(recipes):
        text += f"; or the name of a recipe: {names}"
    config = ("config", Annotated[str, tyro.conf.arg(help=f"{text}.", metavar="FILE")], "none")
    groups = [_group("configuration", [config], "Values from a file; flags win over them.")]
    for name in ORDER:
        part = getattr(defaults, name)
        groups.append(_group(name, _flags(part), type(part).__doc__))
    made = make_dataclass("Flags", groups)
    made.__doc__ = type(defaults).__doc__
    return made


def _group(name: str, flags: list[tuple[str, Any, Any]], text: str | None) -> tuple[str, Any, Any]:
    """A field for a group. Where no help is given tyro looks for the source of the class, and there is none."""
    group = make_dataclass(name, flags)
    group.__doc__ = text
    return name, Annotated[group, tyro.conf.arg(help=text or "")], field(default_factory=group)


def _flags(part: Any) -> list[tuple[str, Any, Any]]:
    """Name, type with help, and default of each field."""
    of: Any = type(part)
    texts, hints = help_texts(of), get_type_hints(of, include_extras=True)
    flags: list[tuple[str, Any, Any]] = []
    for entry in fields(part):
        hint, value, text = hints[entry.name], getattr(part, entry.name), texts.get(entry.name, "")
        if not all(each in (int, float, str, NoneType) or get_origin(each) is Literal for each in _members(hint)):
            flags.append((entry.name, Annotated[hint, tyro.conf.arg(help=text)], value))  # tyro reads it
            continue
        if (registry := registry_of(hint)) is not None:
            summaries = ((name, getattr(each, "summary", "")) for name, each in registry.items())
            text = " ".join([text, *(f"{name}: {summary}." for name, summary in summaries if summary)])
        argument = tyro.conf.arg(help=text, metavar=_metavar(hint))
        flags.append((entry.name, Annotated[str, argument], shown(value)))
    return flags


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
