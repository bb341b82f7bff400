"""Configuration errors, field types, and checks whose messages name value and flag."""

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
    """All problems in a configuration at once.

    Attributes:
        problems: one sentence each, with value and flag.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            super().__init__(self.problems[0])
        else:
            lines = "".join(f"\n  - {each}" for each in self.problems)
            super().__init__(f"{len(self.problems)} problems in the configuration:{lines}")

    # Another rank rebuilds the error from its problems, not from the text.
    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def shown_value(value: Any) -> str:
    """As on a command line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def as_flag(name: str, value: Any) -> str:
    """A field's flag and value, quoted for a shell: `--depth 2`, `--no-shuffle`."""
    if value is False:
        return f"--no-{flag(name)[2:]}"
    if value is True:
        return flag(name)
    return f"{flag(name)} {shlex.quote(shown_value(value))}"


def parse_numbers(name: str, text: str, count: int) -> tuple[int, ...]:
    """A field such as "1,2,7". Raises ValueError unless it has `count` positive integers."""
    words = [word.strip() for word in text.split(",")]
    # int() alone would also read signs and underscores.
    if len(words) != count or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f'{flag(name)} "{text}" must be {count} positive integers, separated by commas')
    return tuple(map(int, words))


def refusal(check: Callable[..., object], *arguments: object) -> list[str]:
    """The message if `check` raises ValueError for these arguments; otherwise empty."""
    try:
        check(*arguments)
    # ConfigError is a ValueError too, and its text has all of its problems.
    except ValueError as error:
        return [str(error)]
    return []


def needs(config: object, needed: str, *names: str) -> list[str]:
    """Fields that are set without the field they depend on."""
    if getattr(config, needed):
        return []
    problems = []
    for name in names:
        value = getattr(config, name)
        if value not in (None, False, 0):
            problems.append(f"{as_flag(name, value)} needs {flag(needed)}")
    return problems


def at_least(config: object, minimum: float, *names: str) -> list[str]:
    """Fields below a minimum; None passes."""
    problems = []
    for name in names:
        value = getattr(config, name)
        if value is not None and value < minimum:
            problems.append(f"{flag(name)} must be at least {minimum}, got {value}")
    return problems


def _file_name(value: object) -> object:
    if not isinstance(value, str) or not value.strip():
        raise PydanticCustomError("file_name", "Input should be the name of a file or folder")
    return value


# pydantic's own str refuses the surrogates that stand for bytes outside UTF-8 in a file name.
FileName = Annotated[str, PlainValidator(_file_name)]
"""Name of a file or folder, in any encoding."""


def registry_of(hint: Any) -> Registry[Any] | None:
    """Registry in a field's annotation; None for other types."""
    return next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Registry)), None)


@cache
def help_texts(part: Any) -> dict[str, str]:
    """A dataclass's docstrings below its fields, each on one line, inherited fields included."""
    # pydantic's use_attribute_docstrings finds no inherited ones (findings/pydantic_inherited_texts.sh).
    texts: dict[str, str] = {}
    # From the base down, so that a subclass may give a field another text.
    for each in reversed(part.__mro__):
        if is_dataclass(each):
            texts.update(_own_texts(each))
    return texts


def _own_texts(part: Any) -> dict[str, str]:
    """Docstring below each field in the class body itself."""
    try:
        source = inspect.getsource(part)
    except OSError:
        # A program that was typed in, or read from a pipe.
        return {}
    (body,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for entry, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name) and isinstance(below, ast.Expr):
            texts[entry.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return texts
