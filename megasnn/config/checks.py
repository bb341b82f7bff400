"""Errors of a configuration, types of its fields, and checks that return messages with value and flag."""

from __future__ import annotations

import ast
import inspect
import shlex
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from functools import cache
from typing import Annotated, Any

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from megasnn.common.registry import Registry

Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
FractionAboveZero = Annotated[float, Field(gt=0, le=1)]
FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]


class ConfigError(ValueError):
    """Lists all that is wrong with a configuration.

    Attributes:
        problems: one sentence each, with value and flag.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        lines = [f"{len(self.problems)} problems in the configuration:", *(f"  - {each}" for each in self.problems)]
        super().__init__(self.problems[0] if len(self.problems) == 1 else "\n".join(lines))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:  # so that other ranks rebuild it
        return type(self), (self.problems,)


def flag(name: str) -> str:
    """Command line flag of a field."""
    return "--" + name.replace("_", "-")


def as_flag(name: str, value: Any) -> str:
    """Flag of a field with a value, as a command line gives it."""
    if isinstance(value, bool):
        return flag(name) if value else f"--no-{flag(name)[2:]}"
    return f"{flag(name)} {shlex.quote(shown_value(value))}"


def shown_value(value: Any) -> str:
    """Value as a command line gives it."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def parse_numbers(name: str, text: str, count: int) -> tuple[int, ...]:
    """The numbers of a field like "1,2,7". Raises ValueError for anything but `count` whole numbers from 1 on."""
    words = [word.strip() for word in text.split(",")]
    if len(words) != count or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f'{flag(name)} "{text}" must be {count} whole numbers from 1 on with commas between them')
    return tuple(map(int, words))


def refusal(check: Callable[..., object], *arguments: object) -> list[str]:
    """Message of the ValueError that a function raises for its arguments; empty where it raises none."""
    try:
        check(*arguments)
    except ValueError as error:
        return [str(error)]
    return []


def needs(config: object, needed: str, *names: str) -> list[str]:
    """Fields that are set although the one that they depend on is not."""
    if getattr(config, needed):
        return []
    values = {name: getattr(config, name) for name in names}
    return [
        f"{flag(name)}{'' if value is True else f' {value}'} needs {flag(needed)}"
        for name, value in values.items()
        if value not in (None, False, 0)
    ]


def at_least(config: object, minimum: float, *names: str) -> list[str]:
    """Fields that are smaller; None passes."""
    found = {name: value for name in names if (value := getattr(config, name)) is not None}
    return [f"{flag(name)} must be at least {minimum}, got {value}" for name, value in found.items() if value < minimum]


def _file_name(value: object) -> object:
    if not isinstance(value, str) or not value.strip():
        raise PydanticCustomError("file_name", "Input should be the name of a file or folder")
    return value


FileName = Annotated[str, PlainValidator(_file_name)]
"""A name that need not be UTF-8, as names of files need not."""


def registry_of(hint: Any) -> Registry[Any] | None:
    """The registry that a field's type takes a name from; None for other types."""
    return next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Registry)), None)


@cache
def help_texts(part: Any) -> dict[str, str]:
    """The text below each field of a dataclass, on one line; those that it inherits included."""
    # pydantic's use_attribute_docstrings finds no inherited ones (findings/pydantic_inherited_texts.sh).
    texts: dict[str, str] = {}
    for each in reversed(part.__mro__):
        if not is_dataclass(each):
            continue
        try:
            source = inspect.getsource(each)  # type: ignore[arg-type]
        except OSError:  # a program that was typed in, or read from a pipe
            continue
        (body,) = ast.parse(textwrap.dedent(source)).body
        assert isinstance(body, ast.ClassDef)
        for entry, below in zip(body.body, body.body[1:], strict=False):
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name) and isinstance(below, ast.Expr):
                texts[entry.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return texts
