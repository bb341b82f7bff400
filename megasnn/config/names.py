"""Flags that take a name from a table: the choices are those of the table when the flags are read."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_type_hints

import tyro

from megasnn.config.checks import flag, refusal
from megasnn.registry import Registry


@dataclass(frozen=True, eq=False)
class _Choices:
    table: Registry[Any]

    def __call__(self) -> Any:
        return Literal[self.table.choices]


def name_in(table: Registry[Any]) -> Any:
    """For `Annotated[str, name_in(TABLE)]`, the type of a field that holds a name of the table."""
    return tyro.conf.arg(constructor_factory=_Choices(table), help_behavior_hint=_default)


def _default(label: str) -> str:
    """How --help ends: of such a field tyro gives the default as a list of words."""
    default = label.strip("[']")
    return "(required)" if default == label else f"(default: {default})"


def table_of(hint: Any) -> Registry[Any] | None:
    """The table that a field's type takes a name from; None for other types."""
    for each in getattr(hint, "__metadata__", ()):
        factory = getattr(each, "constructor_factory", None)
        if isinstance(factory, _Choices):
            return factory.table
    return None


def summaries(table: Registry[Any]) -> str:
    """What the names stand for, as far as the table says it, in a line for --help."""
    told = {name: getattr(entry, "summary", "") for name, entry in table.items()}
    return " ".join(f"{name}: {summary}." for name, summary in told.items() if summary)


def unknown_names(part: Any) -> list[str]:
    """Fields that hold a name which their table lacks."""
    tables = {name: table_of(hint) for name, hint in get_type_hints(type(part), include_extras=True).items()}
    return [
        problem
        for name, table in tables.items()
        if table is not None and getattr(part, name) not in table.choices
        for problem in refusal(table.__getitem__, getattr(part, name))
    ]


def refused_names(config: Any, argv: Sequence[str]) -> list[str]:
    """Why a command line gives names that tables know, but refuse: what reads the flags has no words for it."""
    hints = [get_type_hints(type(getattr(config, part.name)), include_extras=True) for part in fields(config)]
    tables = {name: table for each in hints for name, hint in each.items() if (table := table_of(hint)) is not None}
    reader = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in tables:
        reader.add_argument(flag(name), nargs="?")
    given = vars(reader.parse_known_args(list(argv))[0])
    return [
        problem
        for name, table in tables.items()
        if given[name] in tuple(table.refused)
        for problem in refusal(table.__getitem__, given[name])
    ]


def flags_of_others(part: Any, field: str, table: Registry[Any]) -> list[str]:
    """Flags that were given although they belong to other names of a table than the one that `field` holds."""
    chosen, wrong = getattr(part, field), []
    for name in dict.fromkeys(name for entry in table.values() for name in entry.flags):
        value = getattr(part, name)
        if name not in table[chosen].flags and value != getattr(type(part), name):
            those = " or ".join(other for other, entry in table.items() if name in entry.flags)
            wrong.append(f"{flag(name)} {value} is for {flag(field)} {those}, not {chosen}")
    return wrong
