"""A rank's hold on the process that writes its checkpoints beside training."""

from __future__ import annotations

import mmap
import os
import subprocess
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from megasnn.checkpoint.piece_file import Span, write_shared
from megasnn.child_process import shared_memory, start_program

_PROGRAM = "megasnn.checkpoint.writer"
P = ParamSpec("P")
T = TypeVar("T")


class WriterProcess:
    """A process that calls functions for this one, and memory that it shares. It ends with this one, however that ends.

    It also ends with the thread that makes it, so that has to be one that lasts.

    Args:
        size: bytes of the memory.
        pin_for: a GPU that copies to it.
    Attributes:
        memory: [size] uint8.
    """

    def __init__(self, size: int, pin_for: torch.device | None = None) -> None:
        self._descriptor = shared_memory(max(1, size))
        mapped = mmap.mmap(self._descriptor, 0)
        with suppress(AttributeError, OSError):  # where the system has it: copying to small pages takes longer
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self.memory = torch.frombuffer(mapped, dtype=torch.uint8)[:size]
        self._connection, theirs = Pipe()
        with theirs:
            handles = (theirs.fileno(), self._descriptor)
            try:
                self._process = start_program(_PROGRAM, theirs.fileno(), os.getpid(), handles=handles)
            except OSError:
                os.close(self._descriptor)
                raise
        pinned = self.memory.data_ptr() if pin_for is not None else 0
        self.close = weakref.finalize(self, _end, self._process, self._connection, self._descriptor, pinned)
        if pinned:
            with torch.cuda.device(pin_for):  # a new thread would pin it by way of the first GPU
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(pinned, size, 0))

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


def _end(process: subprocess.Popen[bytes], connection: Connection, descriptor: int, pinned: int) -> None:
    process.kill()
    process.wait()
    connection.close()
    os.close(descriptor)
    if pinned:
        torch.cuda.cudart().cudaHostUnregister(pinned)
