"""The command line, generated from the dataclasses: Megatron's names, help from the fields' texts."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import fields
from itertools import groupby, takewhile
from operator import methodcaller
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from megasnn.config.checks import ConfigError, flag
from megasnn.config.data import PATHS
from megasnn.config.defaults import Values, defaults_of
from megasnn.config.help import flag_groups
from megasnn.config.names import refused_names

Config = TypeVar("Config")
Result = TypeVar("Result")

_registry = ConstructorRegistry()


def parse(
    config_class: type[Config],
    argv: Sequence[str],
    console_outputs: bool = True,
    recipes: Mapping[str, Path] = MappingProxyType({}),
    saved: Values = MappingProxyType({}),
) -> Config:
    """The configuration that a command line describes; not yet validated.

    The values of the file that `--config` names, and a model variant's dimensions, become the defaults, so flags win
    over them and ``--variant X --help`` shows them.

    Args:
        config_class: composes the parts; every field is a dataclass.
        argv: without the program's name.
        console_outputs: False keeps all ranks but one from printing the help or the error.
        recipes: files that `--config` takes by a name.
        saved: values that hold where neither a flag nor the file of `--config` gives one.
    Raises:
        SystemExit: 0 after the help, 2 after an error in the command line.
        ConfigError: the file of `--config` cannot be read, or is none of this configuration; a flag has a name that
            its table refuses with a reason; the shell has made several words of a path.
    """
    silence = io.StringIO()
    defaults = defaults_of(config_class, argv, recipes, saved)
    if wrong := [*refused_names(defaults, argv), *_expanded_by_the_shell(argv)]:
        raise ConfigError(wrong)
    with ExitStack() as stack:
        if not console_outputs:  # tyro's own option lets some errors through
            stack.enter_context(redirect_stdout(silence))
            stack.enter_context(redirect_stderr(silence))
        given = command_line(flag_groups(defaults, recipes), argv, config=(tyro.conf.OmitArgPrefixes,))
    return _from_groups(defaults, given)


def _expanded_by_the_shell(argv: Sequence[str]) -> list[str]:
    """What is wrong where paths of shards were not in quotes."""
    found = {name: _values_of(name, argv) for name in map(flag, PATHS)}
    return [
        f"{name} takes one value, and here are {values}, as a shell makes them of braces and stars: put it in quotes, "
        f'as {name} "train-{{00000..00009}}.tar"'
        for name, values in found.items()
        if values > 1
    ]


def _values_of(name: str, argv: Sequence[str]) -> int:
    """How many words follow a flag, or how many times it follows itself with one of them."""
    behind = [argv[place + 1 :] for place, word in enumerate(argv) if word == name]
    words = [[*takewhile(lambda each: not each.startswith("-"), rest)] for rest in behind]
    with_value = groupby(argv, methodcaller("startswith", f"{name}="))
    return max(map(len, [*words, *([*same] for is_so, same in with_value if is_so)]), default=0)


def command_line(of: Any, argv: Sequence[str] | None, **options: Any) -> Any:
    """`tyro.cli`, where an optional flag says INT or STR: for the tools, whose flags are a dataclass or a function.

    Raises:
        SystemExit: 0 after the help, 2 after an error in the command line.
    """
    with _registry:
        return tyro.cli(of, args=argv, **options)


def subcommands(commands: dict[str, Callable[..., Result]], argv: Sequence[str] | None, description: str) -> Result:
    """Runs one of the functions, by its name on the command line. Raises SystemExit as `command_line` does."""
    with _registry:
        return tyro.extras.subcommand_cli_from_dict(commands, description=description, args=argv)


def _from_groups(defaults: Config, given: Any) -> Config:
    """The configuration with the values of the flags, which stand in other groups than its parts."""
    values: dict[str, Any] = {}
    for group in fields(given):
        values |= vars(getattr(given, group.name))
    parts = {}
    for entry in fields(defaults):  # type: ignore[arg-type]  # a dataclass
        part = type(getattr(defaults, entry.name))
        parts[entry.name] = part(**{each.name: values[each.name] for each in fields(part)})
    return type(defaults)(**parts)


@_registry.primitive_rule
def _optional_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """``float | None`` and the like, where tyro takes "None" only: here also "none", and None is not in the
    help."""
    if get_origin(info.type) not in (Union, UnionType):
        return None
    members = [member for member in get_args(info.type) if member is not NoneType]
    if len(members) != 1 or len(members) == len(get_args(info.type)):
        return None
    choices = [str(choice) for choice in get_args(members[0])]
    convert = str if choices else members[0]

    def from_text(texts: list[str]) -> Any:
        if texts[0].lower() == "none":
            return None
        if choices and texts[0] not in choices:
            raise ValueError(f"{texts[0]!r} is not one of {', '.join(choices)}")
        return convert(texts[0])

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="{" + ",".join(choices) + "}" if choices else convert.__name__.upper(),
        instance_from_str=from_text,
        is_instance=lambda value: value is None or str(value) in choices or isinstance(value, convert),
        str_from_instance=lambda value: ["none" if value is None else str(value)],
    )
