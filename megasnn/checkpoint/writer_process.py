"""A rank's hold on the process that writes its checkpoints beside training."""

from __future__ import annotations

import mmap
import os
import subprocess
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from megasnn.checkpoint.piece_file import Span, write_shared
from megasnn.child_process import shared_memory, start_program

P = ParamSpec("P")
T = TypeVar("T")


class WriterProcess:
    """A process that calls functions for this one, and memory that it shares. It ends with this one, however that ends.

    It also ends with the thread that makes it, so that has to be one that lasts.

    Args:
        size: bytes of the memory.
        pinned: a GPU copies to it.
    Attributes:
        memory: [size] uint8.
    """

    def __init__(self, size: int, pinned: bool = False) -> None:
        self._descriptor = shared_memory(max(1, size))
        mapped = mmap.mmap(self._descriptor, 0)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapped.madvise(mmap.MADV_HUGEPAGE)  # it is copied to as fast as the process's own memory then
        self.memory = torch.frombuffer(mapped, dtype=torch.uint8)[:size]
        pins = [self.memory.data_ptr()] if pinned else []
        for address in pins:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size, 0))
        self._connection, theirs = Pipe()
        with theirs:
            handles = (theirs.fileno(), self._descriptor)
            self._process = start_program("megasnn.checkpoint.writer", theirs.fileno(), os.getpid(), handles=handles)
        self.close = weakref.finalize(self, _end, self._process, self._connection, self._descriptor, pins)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def write(self, path: Path, spans: list[Span]) -> list[str]:
        """Writes these pieces of the memory, offset and length of each, to a file: `write_shared`."""
        return self.call(write_shared, path, self._descriptor, spans)

    def call(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """What the function returns there, or raises. It has to be one of a module without torch.

        Raises ChildProcessError when the process has ended.
        """
        try:
            self._connection.send((function, arguments, named))
            value, error = self._connection.recv()
        except (EOFError, OSError):
            status = self._process.wait()
            raise ChildProcessError(
                f"the process that writes checkpoints has ended with status {status}; the next save starts it anew"
            ) from None
        if error is not None:
            raise error
        return value


def _end(process: subprocess.Popen[bytes], connection: Connection, descriptor: int, pins: Sequence[int]) -> None:
    process.kill()
    process.wait()
    connection.close()
    os.close(descriptor)
    for address in pins:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))
