"""Checks that this Python can import megasnn and meets the requirements of pyproject.toml.

    python scripts/_installed.py [extra ...]

Exit status 0, or 1 with a list of the missing requirements. megasnn itself may be installed or on PYTHONPATH.
"""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

try:
    from packaging.requirements import Requirement
except ImportError as error:
    # packaging is one of the dependencies, so they are incomplete.
    sys.exit(str(error))


def missing(pyproject: Path, extras: list[str]) -> list[str]:
    """Returns the requirements of `pyproject` and its `extras` that this Python does not meet."""
    project = tomllib.loads(pyproject.read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    lacking = [text for text in wanted if not met(Requirement(text))]
    if not find_spec(project["name"]):
        lacking.insert(0, project["name"])
    return lacking


def met(requirement: Requirement) -> bool:
    """True if this Python has a fitting version, or needs none (markers)."""
    if requirement.marker is not None and not requirement.marker.evaluate():
        return True
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(found, prereleases=True)


if __name__ == "__main__":
    lacking = missing(Path(__file__).resolve().parent.parent / "pyproject.toml", sys.argv[1:])
    if lacking:
        sys.exit("missing: " + ", ".join(lacking))
