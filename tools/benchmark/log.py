"""The benchmark's log: one JSON line per row and run, and the latest earlier line of the same row."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megasnn.telemetry.memory import processor_name

Line = Mapping[str, Any]

PACKAGES = ("torch", "spikingjelly", "numba", "triton", "megasnn")


def surroundings(gpu: str | None) -> dict[str, Any]:
    """When, on what, and with which versions a run was made."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": processor_name(), "cores": os.cpu_count(), "gpu": gpu},
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "commit": _commit(),
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Raises ValueError naming the line that is not JSON."""
    if not path.exists():
        return []
    lines = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}, is not JSON ({error}); give another --output") from error
    return lines


def plain(line: Line) -> dict[str, Any]:
    """As it comes back from the log, where a tuple is a list: only so is it equal to an earlier line.

    Numbers that JSON does not have become words.
    """
    return json.loads(json.dumps(line, default=str), parse_constant=str)


def append_lines(path: Path, lines: Sequence[Line]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def latest_alike(line: Line, earlier: Sequence[Line]) -> Line | None:
    """The last of `earlier` with the same configuration on the same kind of machine."""

    def key(of: Line) -> object:
        return of.get("configuration"), of.get("machine")

    return next((other for other in reversed(earlier) if key(other) == key(line)), None)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Of the checkout that this file is in, with "+" behind it where files have changed since."""
    here = Path(__file__).parent
    try:
        text = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return text.stdout.strip()
