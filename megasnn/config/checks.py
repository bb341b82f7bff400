"""Errors of a configuration, and small checks that return messages with value and flag."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megasnn.registry import Registry


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
    found = _numbers(config, names)
    return [f"{flag(name)} must be at least {minimum}, got {value}" for name, value in found if not value >= minimum]


def above(config: object, bound: float, *names: str) -> list[str]:
    """Fields that are not greater than `bound`, or not finite; None passes."""
    found = _numbers(config, names)
    return [f"{flag(name)} must be greater than {bound}, got {value}" for name, value in found if not value > bound]


def _numbers(config: object, names: Iterable[str]) -> Iterator[tuple[str, float]]:
    """Values that are given; one that is not finite compares with nothing."""
    for name in names:
        if (value := getattr(config, name)) is not None:
            yield name, value if math.isfinite(value) else math.nan


def flags_of_others(part: Any, field: str, registry: Registry[Any]) -> list[str]:
    """Flags that were given although they belong to other names of a registry than the one that `field` has."""
    chosen, wrong = getattr(part, field), []
    for name in dict.fromkeys(name for entry in registry.values() for name in entry.flags):
        value = getattr(part, name)
        if name not in registry[chosen].flags and value != getattr(type(part), name):
            those = " or ".join(other for other, entry in registry.items() if name in entry.flags)
            wrong.append(f"{flag(name)} {value} is for {flag(field)} {those}, not {chosen}")
    return wrong
