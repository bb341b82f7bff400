"""MegaSNN's version."""

from __future__ import annotations

from importlib import metadata

try:
    VERSION = metadata.version("megasnn")  # pip makes it from the tag of the commit
except metadata.PackageNotFoundError:
    VERSION = "0.0"  # a checkout on PYTHONPATH
