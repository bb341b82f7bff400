"""The program that writes checkpoints beside training, for one rank, with the lowest priority.

It imports no torch: what it writes lies in memory that it shares with the rank.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection

from megasnn.child_process import end_with, leave_signals_to_the_rank

_LOWEST = 19


def main(connection: str, rank: str) -> None:
    """Calls the functions that come through this connection, until the process `rank` is gone."""
    leave_signals_to_the_rank()
    end_with(int(rank))
    for name in ("complete", "piece_file"):  # before it has to wait for a core
        import_module(f"megasnn.checkpoint.{name}")
    os.setpriority(os.PRIO_PROCESS, 0, _LOWEST)
    calls = Connection(int(connection))
    with suppress(EOFError, ConnectionError):
        while True:
            function, arguments, named = calls.recv()
            try:
                calls.send((function(*arguments, **named), None))
            except Exception as error:
                calls.send((None, error))


if __name__ == "__main__":
    main(*sys.argv[1:])
