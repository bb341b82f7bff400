"""Whether several hosts see one and the same folder.

A file that is there already cannot be created once more: asked for that, a file server answers itself, whatever a host
remembers of the folder. To look for the file instead could find an old state of it for a minute.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def leave_mark(folder: Path) -> Path:
    """Creates an empty file by a name that no folder has yet. Raises OSError."""
    mark = folder / f".shared_{secrets.token_hex(8)}"
    os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    return mark


def sees_mark(mark: Path) -> bool:
    """Whether this process sees the folder in which the mark was left. What it creates elsewhere, it removes."""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return True
    except OSError:
        return False
    mark.unlink()
    return False
