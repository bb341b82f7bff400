"""A file system of a few hundred KiB, for tests of full disks; needs the right to mount."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mounts a tmpfs of `size` (as mount takes it) on `folder`, or skips the test."""
    folder.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("cannot mount a small tmpfs here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path, leave: int = 0) -> Path:
    """Writes a file that leaves so many bytes free, in whole pages; the file."""
    stat = os.statvfs(disk)
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(max(stat.f_bavail * stat.f_frsize - leave, 0)))
    return ballast
