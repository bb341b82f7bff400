"""How large one sample may be: compared with what its file declares, before anything is read or allocated.

A file of some kilobytes can declare an image, an array or a recording that no machine holds.
"""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

from megasnn.files.described import open_regular

SAMPLE_MB = 512
"""Default of --max-sample-mb: an RGB image of 134 million pixels, 41 million events."""
SAMPLE_BYTES = SAMPLE_MB << 20


def too_large(what: str, size: int, limit: int) -> str:
    """What is wrong with something of `size` bytes, empty where it is within the limit."""
    if size <= limit:
        return ""
    return (
        f"{what} would take {size / (1 << 20):,.1f} MB, and a sample may take {limit / (1 << 20):g}; "
        f"if it is sound, raise --max-sample-mb"
    )


def require_size(what: str, size: int, limit: int) -> None:
    """Raises ValueError for something of more bytes than the limit."""
    if problem := too_large(what, size, limit):
        raise ValueError(problem)


def read_file(path: Path, limit: int) -> bytes:
    """The content of a file that the user named, or that lies in a folder which they named. It may be a link.

    Raises:
        ValueError: it has more bytes than the limit, or is a pipe, a device or a folder. It does not name the file.
        OSError: it cannot be opened.
    """
    try:
        file = open_regular(path)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise ValueError(str(error.strerror)) from None
        raise
    with file:
        size = os.fstat(file.fileno()).st_size
        require_size("its content", size, limit)
        return io.BufferedReader(file).read(size)
