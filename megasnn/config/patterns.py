"""Patterns of parameters' names with values, as a flag gives them: `patch_embed.*=0,head=0.1`."""

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
        value: what the parameters get that it matches.
    """

    text: str
    value: float

    def matches(self, name: str) -> bool:
        return fnmatchcase(name, self.text) or fnmatchcase(name, f"{self.text}.*")


def patterns(field: str, text: str | None) -> list[Pattern]:
    """The patterns of a flag, separated by commas; none where the flag was not given.

    Raises:
        ValueError: a pattern is empty, or has no number behind `=`.
    """
    found = []
    for part in [] if text is None else text.split(","):
        name, _, number = part.strip().partition("=")
        try:
            found.append(Pattern(name, float(number)))
        except ValueError:
            name = ""
        if not name:
            raise ValueError(f"{flag(field)}: {part!r} should look like head.*=0.1; several are separated by commas")
    return found


def last_match(found: Iterable[Pattern], name: str) -> Pattern | None:
    """Of several patterns that match a name, the last one counts; None where none does."""
    return next((pattern for pattern in reversed(list(found)) if pattern.matches(name)), None)
