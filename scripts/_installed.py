"""Exit status 0 when this Python can import megasnn and has all that pyproject.toml asks for; else says what it lacks.

megasnn may be installed, or lie on PYTHONPATH; where it is neither, the scripts install it.

python scripts/_installed.py [extra ...]
"""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

try:
    from packaging.requirements import Requirement
except ImportError as error:  # it comes with the dependencies: without it, they are not all there
    sys.exit(str(error))


def missing(pyproject: Path, extras: list[str]) -> list[str]:
    """The requirements of `pyproject` and of its `extras` that the running Python does not meet."""
    project = tomllib.loads(pyproject.read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    lacking = [text for text in wanted if not met(Requirement(text))]
    return lacking if find_spec(project["name"]) else [project["name"], *lacking]


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
