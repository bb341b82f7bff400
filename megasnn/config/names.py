"""Flags that take a name from a registry: the choices are those of the registry when the flags are read."""

from __future__ import annotations

from typing import Any, Literal

import tyro

from megasnn.config.checks import flag
from megasnn.registry import Registry


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


def summaries(registry: Registry[Any]) -> str:
    """One line for --help with the names that have a summary."""
    summary = {name: getattr(entry, "summary", "") for name, entry in registry.items()}
    return " ".join(f"{name}: {text}." for name, text in summary.items() if text)


def flags_of_others(part: Any, field: str, registry: Registry[Any]) -> list[str]:
    """Flags that were given although they belong to other names of a registry than the one that `field` holds."""
    chosen, wrong = getattr(part, field), []
    for name in dict.fromkeys(name for entry in registry.values() for name in entry.flags):
        value = getattr(part, name)
        if name not in registry[chosen].flags and value != getattr(type(part), name):
            those = " or ".join(other for other, entry in registry.items() if name in entry.flags)
            wrong.append(f"{flag(name)} {value} is for {flag(field)} {those}, not {chosen}")
    return wrong
