"""Programs of this package that work beside a rank, without torch, and memory that they share with it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # of Linux, prctl(2)


def start_program(module: str, *arguments: object, handles: Sequence[int]) -> subprocess.Popen[bytes]:
    """Starts `python -m module arguments...`, which has these file descriptors too. Raises OSError."""
    path = os.pathsep.join(entry or working_folder() for entry in sys.path)
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        pass_fds=handles,
        env={**os.environ, **one_thread, "PYTHONPATH": path},
        process_group=0,  # Ctrl-C in a terminal goes to the rank only
    )


def working_folder() -> str:
    """Raises ChildProcessError where it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ChildProcessError(
            "no process can be started: the working folder has been removed; start again from one that exists"
        ) from None


def leave_signals_to_the_rank() -> None:
    """Ignores what a launcher or a terminal sends to all processes: the rank needs this one until it has saved."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def end_with(parent: int) -> None:
    """Has the system kill this process when the thread that started it ends, and with it the process `parent`.

    Linux only; elsewhere this process has to notice that its connection has no other end.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended before that
            sys.exit(1)


def shared_memory(size: int) -> int:
    """A new file descriptor for `size` bytes of zeros, to be closed by the caller.

    The memory has no name: it is gone when the last process has let go of it. It does not lie in /dev/shm, which has
    64 MB in a container that nobody told otherwise. Raises OSError where the system has none, or none of this size.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("megasnn", os.MFD_CLOEXEC)
    else:  # not on Linux
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
