"""Small checks that the parts share. Each returns what is wrong, as messages with value and flag."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal, get_args, get_origin, get_type_hints

FOR_RUNS = {"for_runs": True}
"""Metadata of a field whose flag only a whole run takes: an Engine has no use for it."""
FOR_ENGINES = {"for_runs": False}
"""Metadata of a field whose flag an Engine takes, in a part of the configuration that is `for_runs` otherwise."""


class ConfigError(ValueError):
    """Everything that is wrong with a configuration.

    Attributes:
        problems: one message each; the text of the error lists them all.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "1 problem in the configuration:" if count == 1 else f"{count} problems in the configuration:"
        super().__init__("\n".join([head, *(f"  - {problem}" for problem in self.problems)]))


def flag(name: str) -> str:
    """The command line flag of a field."""
    return "--" + name.replace("_", "-")


def at_least(config: object, minimum: float, *names: str) -> list[str]:
    """Fields that are smaller, or not finite; None is an option that was not given and is fine."""
    return [
        f"{flag(name)} must be at least {minimum}{_and_finite(value)}, got {value}"
        for name, value in _given(config, names)
        if not (math.isfinite(value) and value >= minimum)
    ]


def above(config: object, bound: float, *names: str) -> list[str]:
    """Fields that are not greater than `bound`, or not finite."""
    return [
        f"{flag(name)} must be greater than {bound}{_and_finite(value)}, got {value}"
        for name, value in _given(config, names)
        if not (math.isfinite(value) and value > bound)
    ]


def not_a_choice(config: object) -> list[str]:
    """Fields of a Literal type that have another value, which a flag cannot have and an argument in Python can."""
    hints = get_type_hints(type(config))
    choices = {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
    return [
        f"{flag(name)} must be {' or '.join(map(str, allowed))}, got {getattr(config, name)}"
        for name, allowed in choices.items()
        if getattr(config, name) not in allowed
    ]


def from_zero_to_below_one(config: object, *names: str) -> list[str]:
    """Fields outside [0, 1)."""
    return [
        f"{flag(name)} must be at least 0 and below 1, got {value}"
        for name, value in _given(config, names)
        if not 0 <= value < 1
    ]


def needs(config: object, needed: str, *names: str) -> list[str]:
    """Fields that are set although the one they depend on is not."""
    if getattr(config, needed):
        return []
    return [
        f"{_with_value(name, getattr(config, name))} needs {flag(needed)}"
        for name in names
        if getattr(config, name) not in (None, False)
    ]


def refusal(check: Callable[..., object], *arguments: object) -> list[str]:
    """What a function that raises ValueError says about its arguments."""
    try:
        check(*arguments)
    except ValueError as error:
        return [str(error)]
    return []


def _given(config: object, names: Iterable[str]) -> list[tuple[str, float]]:
    values = [(name, getattr(config, name)) for name in names]
    return [(name, value) for name, value in values if value is not None]


def _and_finite(value: float) -> str:
    """What a value is to be beside its bound, where that is what is wrong with it."""
    return "" if math.isfinite(value) else " and finite"


def _with_value(name: str, value: object) -> str:
    return flag(name) if value is True else f"{flag(name)} {value}"
