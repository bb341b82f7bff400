"""Choices of tools' flags, as tyro takes them, and exit status of a tool."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal

import tyro

from megasnn.common.registry import Registry
from megasnn.schedule.named import SCHEDULES


def run_tool(name: str, call: Callable[[], object]) -> int:
    """Exit status of a tool: 0; 1 for what cannot be done, after saying why on stderr; 130 when interrupted."""
    try:
        call()
    except (ValueError, OSError, ImportError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    return 0


def name_in(registry: Registry[Any]) -> Any:
    """Choices of a tool's flag, `Annotated[str, name_in(SCHEDULES)]`; a configuration's has the registry itself."""

    def choices() -> Any:
        return Literal[registry.choices]

    def hint(default: str) -> str:  # tyro gives it as a list
        default = default.strip("[']")
        return f"(default: {default})" if default else "(required)"

    return tyro.conf.arg(constructor_factory=choices, help_behavior_hint=hint)


ScheduleName = Annotated[str, name_in(SCHEDULES)]
