"""What `torch.save` writes around the values of one tensor, so that torch's own reader understands our pieces."""

from __future__ import annotations

import io
import struct
import zipfile
from functools import lru_cache
from typing import Any

import torch
from torch.utils.serialization import config as serialization

from megasnn.checkpoint.checksum import BLOCK
from megasnn.checkpoint.raw import member_begin
from megasnn.files.problems import DamagedError


@lru_cache(maxsize=4096)
def torch_frame(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What `torch.save` writes before and after the values of a tensor of this shape, whichever they are."""
    values = torch.empty(shape, dtype=dtype)  # the system gives no memory to what is not written to
    stream = io.BytesIO() if values.nbytes <= BLOCK else _AroundLargest()
    with serialization.patch({"save.compute_crc32": False}):  # type: ignore[attr-defined]
        torch.save(values, stream)  # type: ignore[arg-type]
    if isinstance(stream, _AroundLargest):
        return bytes(stream.before), bytes(stream.after)
    content = stream.getvalue()
    begin = values_at(content, values.nbytes, dtype.itemsize)
    return content[:begin], content[begin + values.nbytes :]


class _AroundLargest:
    """A stream that keeps all but the one write of more than a block, which is the values."""

    def __init__(self) -> None:
        self.before, self.after = bytearray(), bytearray()
        self._passed = False

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if size > BLOCK:
            self._passed = True
        else:
            (self.after if self._passed else self.before).extend(data)
        return size

    def flush(self) -> None:
        """torch.save calls it."""


def values_at(content: memoryview | bytes, size: int, item: int) -> int:
    """Where in what `torch.save` wrote for one tensor its values begin.

    Args:
        size: bytes of all values.
        item: bytes of one.
    Raises:
        DamagedError: there are no such values, or they are not aligned.
    """
    try:
        with zipfile.ZipFile(stream := io.BytesIO(content)) as archive:
            (entry,) = (entry for entry in archive.filelist if entry.filename.endswith("/data/0"))
            begin = member_begin(stream, entry)
    except (zipfile.BadZipFile, ValueError, struct.error, OverflowError, NotImplementedError) as error:
        raise DamagedError(f"a small piece is not as torch.save writes it: {error}") from None
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != size or not 0 <= begin <= len(content) - size:
        raise DamagedError(f"a small piece holds {entry.file_size} bytes of values instead of {size}")
    if begin % item:
        raise DamagedError(f"a small piece holds its values at {begin}, which is not aligned for {item} bytes each")
    return begin
