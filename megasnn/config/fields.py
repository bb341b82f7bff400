"""Types of fields: bounds of numbers, names of registries, patterns of parameters' names; and their help."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, is_dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Annotated, Any, Literal

import tyro
from pydantic import Field

from megasnn.config.checks import flag
from megasnn.registry import Registry

Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]


def name_in(registry: Registry[Any]) -> Any:
    """Choices of a tool's flag, `Annotated[str, name_in(SCHEDULES)]`; a configuration's has the registry itself."""

    def choices() -> Any:
        return Literal[registry.choices]

    def hint(default: str) -> str:  # tyro gives it as a list
        default = default.strip("[']")
        return f"(default: {default})" if default else "(required)"

    return tyro.conf.arg(constructor_factory=choices, help_behavior_hint=hint)


def registry_of(hint: Any) -> Registry[Any] | None:
    """The registry that a field's type takes a name from; None for other types."""
    return next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Registry)), None)


@dataclass(frozen=True)
class Pattern:
    """Pattern of parameters' names with a value, as in `--lr-scale-of patch_embed.*=0,head=0.1`.

    Attributes:
        text: with `*` for any characters, dots included. The name of a layer stands for all that is below it.
    """

    text: str
    value: float

    def matches(self, name: str) -> bool:
        return fnmatchcase(name, self.text) or fnmatchcase(name, f"{self.text}.*")


def patterns(field: str, text: str | None) -> list[Pattern]:
    """The patterns of a flag, separated by commas. Raises ValueError for one that is empty or has no number."""
    found = []
    for part in [] if text is None else text.split(","):
        name, _, number = part.strip().partition("=")
        try:
            found.append(Pattern(name, float(number if name else "")))
        except ValueError:
            raise ValueError(
                f"{flag(field)}: {part!r} should look like head.*=0.1; several are separated by commas"
            ) from None
    return found


def last_match(found: Iterable[Pattern], name: str) -> Pattern | None:
    """Last of the patterns that match a name, which is the one that counts; None where none does."""
    return next((pattern for pattern in reversed(list(found)) if pattern.matches(name)), None)


@cache
def help_texts(part: Any) -> dict[str, str]:
    """The text below each field of a dataclass, on one line; those that it inherits included."""
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
