"""Starts the processes that read samples: copies of one that has imported what they need, and no torch.

That one is a program of its own, started when the first is needed; the copies take milliseconds and little memory. A
copy of the rank itself would hold on to its memory, sockets and locks, and might wait for ever for a lock that another
thread of the rank held.
"""

from __future__ import annotations

import os
import subprocess
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle

from megasnn.child_process import start_program, working_folder


class Template:
    """The process that is copied. It ends with this one, however this one ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control, theirs = Pipe()
        with theirs:
            self._process = start_program("megasnn.data.worker", theirs.fileno(), handles=[theirs.fileno()])
        self._owner = os.getpid()

    @property
    def usable(self) -> bool:
        """False where it has ended, or belongs to the process that this one was forked from."""
        return self._owner == os.getpid() and self._process.poll() is None

    def start(self, connection: Connection, descriptors: Connection, memory: int) -> int:
        """The process id of a new worker, which has the other ends of two connections, and a descriptor of memory.

        Raises ChildProcessError when it cannot be started.
        """
        handles = (connection.fileno(), descriptors.fileno(), memory)
        folder = working_folder()
        with self._lock:
            try:
                self._control.send(("start", folder))
                for handle in handles:
                    send_handle(self._control, handle, self._process.pid)
                return int(self._control.recv())
            except (EOFError, OSError) as error:
                status = self._ended()
                raise ChildProcessError(
                    f"no data worker can be started: {error!r}; their template ended with status {status}"
                ) from error

    def end(self, worker: int) -> int | None:
        """Kills a worker that has not ended yet. Its exit status, as `subprocess` has it.

        None when it was told before, or nobody knows.
        """
        with self._lock:
            try:
                self._control.send(("end", worker))
                status: int | None = self._control.recv()
                return status
            except (EOFError, OSError):  # without a template its workers are strangers; they end with their connection
                return None

    def _ended(self) -> int:
        """The exit status; ends the process where it has not ended by itself. It may wait for what never comes."""
        try:
            return self._process.wait(_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


_LAST_SECONDS = 1.0
_template: Template | None = None


def template() -> Template:
    """The template of this process; started where there is none."""
    global _template
    if _template is None or not _template.usable:
        _template = Template()
    return _template
