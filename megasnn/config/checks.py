"""Errors of a configuration, and small checks that return messages with value and flag."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """Lists all that is wrong with a configuration.

    Attributes:
        problems: one sentence each, with value and flag.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        lines = [f"{len(self.problems)} problems in the configuration:", *(f"  - {each}" for each in self.problems)]
        super().__init__(self.problems[0] if len(self.problems) == 1 else "\n".join(lines))


def flag(name: str) -> str:
    """Command line flag of a field."""
    return "--" + name.replace("_", "-")


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
    given = {name: getattr(config, name) for name in names}
    return [
        f"{flag(name)}{'' if value is True else f' {value}'} needs {flag(needed)}"
        for name, value in given.items()
        if value not in (None, False, 0)
    ]


def at_least(config: object, minimum: float, *names: str) -> list[str]:
    """Fields that are smaller, or not finite; None passes."""
    return [
        f"{flag(name)} must be at least {minimum}, got {value}"
        for name in names
        if (value := getattr(config, name)) is not None and not (math.isfinite(value) and value >= minimum)
    ]


def above(config: object, bound: float, *names: str) -> list[str]:
    """Fields that are not greater than `bound`, or not finite; None passes."""
    return [
        f"{flag(name)} must be greater than {bound}, got {value}"
        for name in names
        if (value := getattr(config, name)) is not None and not (math.isfinite(value) and value > bound)
    ]


def from_zero_to_below_one(config: object, *names: str) -> list[str]:
    """Fields outside [0, 1)."""
    return [
        f"{flag(name)} must be at least 0 and below 1, got {value}"
        for name in names
        if not 0 <= (value := getattr(config, name)) < 1
    ]


def not_a_choice(config: object) -> list[str]:
    """Fields of a Literal type that have another value."""
    hints = get_type_hints(type(config))
    choices = {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
    return [
        f"{flag(name)} must be {' or '.join(map(str, allowed))}, got {getattr(config, name)}"
        for name, allowed in choices.items()
        if getattr(config, name) not in allowed
    ]
