"""The version that is installed."""

from __future__ import annotations

from importlib import metadata


def installed_version() -> str:
    """The version that pip has installed, made from the tag of the commit; 0.0 for a checkout on PYTHONPATH."""
    try:
        return metadata.version("megasnn")
    except metadata.PackageNotFoundError:
        return "0.0"


__version__ = installed_version()
