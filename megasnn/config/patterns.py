"""Patterns of parameters' names, as flags give them: `patch_embed.*,blocks.0` and `head.*=0.1`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megasnn.config.checks import flag


@dataclass(frozen=True)
class Pattern:
    """
    Attributes:
        text: with `*` for any characters, dots included. The name of a layer stands for all that is below it.
        value: what the parameters get that it matches; where patterns have values.
    """

    text: str
    value: float = 0.0

    def matches(self, name: str) -> bool:
        return fnmatchcase(name, self.text) or fnmatchcase(name, f"{self.text}.*")


def patterns(field: str, text: str | None, with_values: bool = True) -> list[Pattern]:
    """The patterns of a flag, separated by commas; none where the flag was not given.

    Raises:
        ValueError: a pattern is empty, or has no number behind `=` where it should have one.
    """
    return [] if text is None else [_pattern(field, part.strip(), with_values) for part in text.split(",")]


def _pattern(field: str, part: str, with_values: bool) -> Pattern:
    name, equals, number = part.partition("=")
    example = "head.*=0.1" if with_values else "patch_embed.*"
    if not name or bool(equals) != with_values:
        raise ValueError(f"{flag(field)}: {part!r} should look like {example}; several are separated by commas")
    try:
        return Pattern(name, float(number or 0))
    except ValueError:
        raise ValueError(f"{flag(field)}: {number!r} in {part!r} is no number") from None


def last_match(found: Iterable[Pattern], name: str) -> Pattern | None:
    """Of several patterns that match a name, the last one counts; None where none does."""
    return next((pattern for pattern in reversed(list(found)) if pattern.matches(name)), None)
