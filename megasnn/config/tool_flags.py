"""Flags of tools, by tyro: from the fields of a dataclass, or the arguments of a function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import tyro

from megasnn.registry import Registry
from megasnn.schedule.named import SCHEDULES
from megasnn.schedule.passes import RECOMPUTE


def command_line(of: Any, argv: Sequence[str] | None, **options: Any) -> Any:
    """Reads the flags of a tool. Raises SystemExit as tyro does."""
    return tyro.cli(of, args=argv, **options)


def name_in(registry: Registry[Any]) -> Any:
    """Choices of a tool's flag, `Annotated[str, name_in(SCHEDULES)]`; a configuration's has the registry itself."""

    def choices() -> Any:
        return Literal[registry.choices]

    def hint(default: str) -> str:  # tyro gives it as a list
        default = default.strip("[']")
        return f"(default: {default})" if default else "(required)"

    return tyro.conf.arg(constructor_factory=choices, help_behavior_hint=hint)


RecomputeName = Annotated[str, name_in(RECOMPUTE)]
ScheduleName = Annotated[str, name_in(SCHEDULES)]
