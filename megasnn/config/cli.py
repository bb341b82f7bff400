"""The command line, generated from the dataclasses: Megatron's names, help from the fields' texts."""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import field, fields, is_dataclass, make_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

from megasnn.config.checks import ConfigError, flag
from megasnn.config.data import PATHS
from megasnn.config.names import registry_of, summaries
from megasnn.config.sources import Values, defaults_of, sources_of
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
        saved: values that hold where neither a flag nor the file of `--config` gives one.
    Raises:
        SystemExit: 0 after the help, 2 for flags that lack a value.
        ConfigError: unknown flags, wrong values, a file that cannot be read or is none of this configuration, paths of
            which the shell has made several words.
    """
    silence = io.StringIO()
    defaults = defaults_of(config_class, sources_of(config_class, argv, recipes, saved))
    if wrong := _expanded_by_the_shell(argv):
        raise ConfigError(wrong)
    groups = _groups(defaults, recipes)
    with ExitStack() as stack:
        if not console_outputs:  # tyro's own option lets some errors through
            stack.enter_context(redirect_stdout(silence))
            stack.enter_context(redirect_stderr(silence))
        options: dict[str, Any] = {"config": (tyro.conf.OmitArgPrefixes,), "return_unknown_args": True}
        given, unknown = command_line(groups, argv, **options)
    values = _values(defaults, given)
    if unknown:
        known = [flag(name) for part in values.values() for name in part]
        flags = [_unknown(word, known) for word in unknown if word.startswith("--")]
        raise ConfigError(flags or [f"{unknown[0]!r} belongs to no flag"])
    return from_dict(config_class, values, texts=True)


def flag_names(config_class: type[Any]) -> dict[str, tuple[str, ...]]:
    """Fields of each part that are flags, in the order of --help."""
    plain = config_class()
    return {name: tuple(each.name for each in fields(getattr(plain, name))) for name in ORDER}


def _unknown(word: str, known: Sequence[str]) -> str:
    name = word.partition("=")[0].replace("_", "-")
    near = get_close_matches(name, known, 1, 0.75)
    return f"unknown flag {name}" + "".join(f"; is it {each}?" for each in near)


def _expanded_by_the_shell(argv: Sequence[str]) -> list[str]:
    """Paths of shards that were not in quotes: several words behind a flag, or `flag=a flag=b` as braces make it."""
    wrong = []
    for name in map(flag, PATHS):
        several = any(
            (first == name and not third.startswith("-"))
            or (first.startswith(f"{name}=") and second.startswith(f"{name}="))
            for first, second, third in zip(argv, argv[1:], [*argv[2:], "-"], strict=False)
        )
        if several:
            wrong.append(
                f"{name} takes one value, and here are several, as a shell makes them of braces and stars: put it in "
                f'quotes, as {name} "train-{{00000..00009}}.tar"'
            )
    return wrong


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
    whole = make_dataclass("Flags", groups)
    whole.__doc__ = type(defaults).__doc__
    return whole


def _group(name: str, flags: list[tuple[str, Any, Any]], text: str | None) -> tuple[str, Any, Any]:
    """A field for a group. Where no help is given tyro looks for the source of the class, and there is none."""
    group = make_dataclass(name, flags)
    group.__doc__ = text
    return name, Annotated[group, tyro.conf.arg(help=text or "")], field(default_factory=group)


def _flags(part: Any) -> list[tuple[str, Any, Any]]:
    """Name, type with help, and default of each field."""
    of: Any = type(part)
    texts, hints = help_texts(of), get_type_hints(of, include_extras=True)
    flags = []
    for entry in fields(part):
        hint, value = hints[entry.name], getattr(part, entry.name)
        registry = registry_of(hint)
        text = " ".join(filter(None, (texts.get(entry.name), summaries(registry) if registry is not None else "")))
        if value is True:  # only a negative form of the flag takes back what a file says
            hint = bool
        if _is_text(hint):
            argument = tyro.conf.arg(help=text, metavar=_metavar(hint))
            flags.append((entry.name, Annotated[str, argument], shown(value)))
        else:
            flags.append((entry.name, Annotated[hint, tyro.conf.arg(help=text)], value))
    return flags


def _values(defaults: Any, given: Any) -> dict[str, dict[str, Any]]:
    """Values of the flags by part; texts that are as they were stand for the default."""
    values: dict[str, dict[str, Any]] = {}
    for name in ORDER:
        part = getattr(defaults, name)
        hints = get_type_hints(type(part), include_extras=True)
        values[name] = {}
        for entry, given_value in vars(getattr(given, name)).items():
            default = getattr(part, entry)
            if given_value == shown(default):
                values[name][entry] = default
            else:
                values[name][entry] = _read(hints[entry], given_value) if _is_text(hints[entry]) else given_value
    return values


def _read(hint: Any, text: str) -> Any:
    """None and numbers of a choice, as pydantic wants them; all other texts it reads itself."""
    members = _members(hint)
    if NoneType in members and text.lower() == "none":
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


def _is_text(hint: Any) -> bool:
    """Whether a flag is read as a text; tyro reads booleans and what else a model of one's own may have."""
    return all(each in (int, float, str, NoneType) or get_origin(each) is Literal for each in _members(hint))


def _metavar(hint: Any) -> str:
    registry = registry_of(hint)
    if registry is not None:
        return "{" + ",".join(registry.choices) + "}"
    member = next(each for each in _members(hint) if each is not NoneType)
    choices = [str(choice) for choice in get_args(member)]
    return "{" + ",".join(choices) + "}" if choices else member.__name__.upper()


@cache
def help_texts(part: type) -> dict[str, str]:
    """The text below each field of a dataclass, on one line; those that it inherits included."""
    texts: dict[str, str] = {}
    for each in reversed(part.__mro__):
        if not is_dataclass(each):
            continue
        try:
            source = inspect.getsource(each)
        except OSError:  # a program that was typed in, or read from a pipe
            continue
        (body,) = ast.parse(textwrap.dedent(source)).body
        assert isinstance(body, ast.ClassDef)
        for entry, below in zip(body.body, body.body[1:], strict=False):
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name) and isinstance(below, ast.Expr):
                texts[entry.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return texts
