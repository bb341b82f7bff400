"""Errors of a configuration, and small checks that return messages with value and flag."""

from __future__ import annotations

from collections.abc import Callable, Iterable


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


def numbers(name: str, text: str, count: int) -> tuple[int, ...]:
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
    given = {name: getattr(config, name) for name in names}
    return [
        f"{flag(name)}{'' if value is True else f' {value}'} needs {flag(needed)}"
        for name, value in given.items()
        if value not in (None, False, 0)
    ]


def at_least(config: object, minimum: float, *names: str) -> list[str]:
    """Fields that are smaller; None passes."""
    found = {name: value for name in names if (value := getattr(config, name)) is not None}
    return [f"{flag(name)} must be at least {minimum}, got {value}" for name, value in found.items() if value < minimum]
