"""Exit status 0 when this Python has megasnn and all that pyproject.toml asks for; else says what is missing.

python scripts/_installed.py [extra ...]
"""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path

try:
    from packaging.requirements import Requirement
except ImportError as error:  # it comes with the dependencies: without it, they are not all there
    sys.exit(str(error))


def missing(pyproject: Path, extras: list[str]) -> list[str]:
    """The requirements of `pyproject` and of its `extras` that the running Python does not meet."""
    project = tomllib.loads(pyproject.read_text())["project"]
    wanted = [project["name"], *project["dependencies"]]
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    return [text for text in wanted if not met(Requirement(text))]


def met(requirement: Requirement) -> bool:
    """Whether the running Python has a version that fits."""
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
