"""Flags with the choices of a table, and the exit status of a tool."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal

import tyro

from megasnn.common.registry import Registry
from megasnn.schedule.named import SCHEDULES


def run_tool(name: str, call: Callable[[], object]) -> int:
    """Runs a tool and returns its exit status: 0; 1 for an error, printed on stderr; 130 for Ctrl-C."""
    try:
        call()
    except (ValueError, OSError, ImportError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        # 128 + the number of SIGINT, as a shell reports it.
        return 130
    return 0


def name_in(registry: Registry[Any]) -> Any:
    """Marks a flag of a tool as a name from a table: `Annotated[str, name_in(SCHEDULES)]`."""

    def choices() -> Any:
        return Literal[registry.choices]

    def hint(default: str) -> str:
        # With a constructor of one's own tyro formats the default as a list: "['auto']".
        name = default.strip("[']")
        if name:
            return f"(default: {name})"
        return "(required)"

    return tyro.conf.arg(constructor_factory=choices, help_behavior_hint=hint)


ScheduleName = Annotated[str, name_in(SCHEDULES)]
