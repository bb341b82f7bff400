"""A configuration as a dictionary, as JSON and as a table to print."""

from __future__ import annotations

import json
import reprlib
import shlex
from dataclasses import asdict, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from megasnn.config.checks import ConfigError, flag, refusal
from megasnn.config.names import table_of
from megasnn.files.described import in_message

Config = TypeVar("Config")
ABOUT = "about"
"""Beside the parts in a file: of which model the values are. A file need not say it."""


def to_dict(config: Any) -> dict[str, Any]:
    """Nested dictionaries of numbers, strings, booleans and None."""
    return asdict(config)


def from_dict(config_class: type[Config], values: dict[str, Any]) -> Config:
    """The inverse of `to_dict`; what is missing takes its default.

    Raises ConfigError that lists unknown names and values of a wrong type.
    """
    problems: list[str] = []
    config = _build(config_class, values, "", problems)
    if problems:
        raise ConfigError(problems)
    return config


def with_model_name(config: Any) -> dict[str, Any]:
    """`to_dict` of a whole run, and the name of its model: what config.json holds."""
    return {ABOUT: {"model": config.model.name}, **to_dict(config)}


def to_json(config: Any) -> str:
    """The text of config.json."""
    return json.dumps(with_model_name(config), indent=2)


def _build(config_class: type[Config], values: Any, place: str, problems: list[str]) -> Config:
    if not isinstance(values, dict):
        problems.append(f"{place.rstrip('.') or 'the configuration'} must be a dictionary, got {reprlib.repr(values)}")
        values = {}
    hints = get_type_hints(config_class, include_extras=True)
    known: dict[str, Any] = {}
    for name, value in values.items():
        if name not in hints:
            problems.append(f"unknown name {place}{in_message(name)}")
        elif is_dataclass(hints[name]):
            known[name] = _build(hints[name], value, f"{place}{name}.", problems)
        elif _fits(hints[name], value):
            known[name] = float(value) if type(value) is int and float in _members(hints[name]) else value
        elif (table := table_of(hints[name])) is not None and value in tuple(table.refused):
            problems += refusal(table.__getitem__, value)
        else:
            problems.append(_wrong_type(place, name, hints[name], value))
    return config_class(**known)


def wrong_types(part: Any) -> list[str]:
    """Fields of a dataclass whose values are not of their types, as from Python they may be."""
    hints = get_type_hints(type(part), include_extras=True)
    values = {entry.name: getattr(part, entry.name) for entry in fields(part)}
    return [
        _wrong_type(f"{type(part).__name__}.", name, hints[name], value)
        for name, value in values.items()
        if not _fits(hints[name], value)
    ]


def _wrong_type(place: str, name: str, hint: Any, value: Any) -> str:
    wanted = " or ".join(dict.fromkeys(_wanted(hint)))
    return f"{place}{name} ({flag(name)}) cannot be {reprlib.repr(value)}; give {wanted}"


def _members(hint: Any) -> tuple[Any, ...]:
    """The types that a union allows; of another type, the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _wanted(hint: Any) -> list[str]:
    """What `_fits` takes, in words."""
    table = table_of(hint)
    if table is not None:
        return [str(choice) for choice in table.choices]
    if get_origin(hint) is Annotated:
        return _wanted(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [word for member in _members(hint) for word in _wanted(member)]
    if get_origin(hint) is Literal:
        return [str(choice) for choice in get_args(hint)]
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", NoneType: "null"}
    return [words.get(hint, getattr(hint, "__name__", str(hint)))]


def _fits(hint: Any, value: Any) -> bool:
    table = table_of(hint)
    if table is not None:
        return value in table.choices
    if get_origin(hint) is Annotated:
        return _fits(get_args(hint)[0], value)
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(member, value) for member in _members(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint is NoneType:
        return value is None
    if hint is Any:
        return True
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else get_origin(hint) or hint)


def describe(config: Any) -> str:
    """A table of all values by part; an asterisk marks those that differ from the default."""
    lines = []
    for part in fields(config):
        values = getattr(config, part.name)
        defaults = _defaults_of(values)
        lines.append(f"{part.name}")
        for entry in fields(values):
            value = getattr(values, entry.name)
            mark = " " if value == getattr(defaults, entry.name) else "*"
            lines.append(f"  {mark} {entry.name} {'.' * (40 - len(entry.name))} {_shown(value)}")
    return "\n".join(lines)


def changed_flags(config: Any) -> dict[str, list[str]]:
    """The flags of each part that differ from their defaults, as a command line gives them; parts without any are
    left out."""
    parts = {part.name: getattr(config, part.name) for part in fields(config)}
    changed = {name: _differing(_defaults_of(values), values) for name, values in parts.items()}
    return {name: flags for name, flags in changed.items() if flags}


def flags_between(before: Any, after: Any) -> list[str]:
    """The flags that make one configuration of another of the same class, as a command line gives them."""
    return [
        each for part in fields(after) for each in _differing(getattr(before, part.name), getattr(after, part.name))
    ]


def _differing(before: Any, after: Any) -> list[str]:
    names = [entry.name for entry in fields(after) if getattr(before, entry.name) != getattr(after, entry.name)]
    return [as_flag(name, getattr(after, name)) for name in names]


def comparable_flags(config: Any) -> dict[str, bool | int | float | str]:
    """What runs are compared by: the model, and the values of `_COMPARED` and all other flags that define what is
    computed where they differ from the default."""
    found: dict[str, bool | int | float | str] = {}
    for part in fields(config):
        if part.name in ("checkpoint", "logging"):
            continue
        values = getattr(config, part.name)
        defaults = _defaults_of(values)
        for entry in fields(values):
            value = getattr(values, entry.name)
            if part.name == "model" or entry.name in _COMPARED or value != getattr(defaults, entry.name):
                found[entry.name] = "none" if value is None else value
    return found


_COMPARED = {
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "pipeline_schedule"),
    *("micro_batch_size", "global_batch_size", "seed", "precision", "loss", "label_smoothing", "augment"),
    *("lr", "min_lr", "lr_decay_style", "weight_decay", "clip_grad", "tau", "surrogate"),
}


def as_flag(name: str, value: Any) -> str:
    """The flag of a field with a value, as a command line gives it."""
    if isinstance(value, bool):
        return flag(name) if value else f"--no-{flag(name)[2:]}"
    return f"{flag(name)} {shlex.quote(_shown(value))}"


def _defaults_of(part: Any) -> Any:
    """A part made without arguments; a model's defaults are those of its variant."""
    variant = getattr(part, "variant", None)
    return type(part)(variant=variant) if variant else type(part)()


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
