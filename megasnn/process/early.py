"""A signal while a program starts ends it with a line: before it trains there is nothing to save.

What this imports is small, so that a script can begin with it, before anything that takes time.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""What asks a run for its end."""


@contextmanager
def signals_end_it(
    status: Callable[[int], int] = lambda number: 128 + number, who: str | None = None
) -> Iterator[None]:
    """Within it SIGTERM and SIGINT end the process at once, until others take them: megasnn.process.signals does.

    Behind it signals do what they did before, for a program or a notebook that goes on after a run. Only the main
    thread of a program can handle signals; anywhere else nothing is changed.

    Args:
        status: the exit status for a signal's number.
        who: how the line begins; by default with this rank. Ctrl-C comes to all ranks, and the first one of each
            machine speaks.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    rank = os.environ.get("RANK", "0")
    is_first = os.environ.get("LOCAL_RANK", rank) == "0"

    def end(number: int, frame: object) -> None:
        if number == signal.SIGTERM or is_first:
            text = f"{who or f'[rank {rank}]'} told to stop ({signal.Signals(number).name}) while starting\n"
            with suppress(OSError):  # whatever the program was writing, this comes beside it
                os.write(2, text.encode())
        os._exit(status(number))

    before, woken = {number: signal.getsignal(number) for number in SIGNALS}, signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT):
        if before[number] is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, end)
    try:
        yield
    finally:
        listening = signal.set_wakeup_fd(woken)
        if listening >= 0:
            os.close(listening)  # which ends the thread of megasnn.process.signals
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def end_without_a_line() -> None:
    """Within `signals_end_it`: from here on a signal ends this process silently, since it has said why it ends."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
