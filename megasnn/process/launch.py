"""How the pretrain scripts begin: the command line, checked on every rank before torch is imported."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

from megasnn.config import ConfigError, PretrainConfig
from megasnn.process.installation import misfit
from megasnn.process.terminal import keep_going
from megasnn.process.torchrun import tell_torchrun

# torchrun stops the other ranks as soon as the first one ends, and they may be slower to say what is wrong.
OTHERS_SPEAK_S = 3.0

Config = TypeVar("Config", bound=PretrainConfig)


def launch(read: Callable[[bool], Config], train: Callable[[Config], int]) -> int:
    """Reads the configuration, then trains; the exit status, 2 for one that cannot work.

    A mistake in the flags is told within a moment, by the first rank of each machine, since each machine is given a
    command line of its own; the others say that it does.

    Args:
        read: makes the configuration of a command line, or raises ConfigError for one that cannot work; told whether
            this rank may print the help or an error.
        train: where torch should be imported.
    Raises:
        SystemExit: after the help.
    """
    training = threading.Event()
    keep_going(training.is_set)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    speaks = int(os.environ.get("LOCAL_RANK", rank)) == 0
    try:
        config = read(speaks)
    except (SystemExit, ConfigError) as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        if speaks:
            tell_torchrun("the command line is wrong")
            sys.stderr.write(f"[rank {rank}] {error}\n" if isinstance(error, ConfigError) else "")
        else:
            sys.stderr.write(f"[rank {rank}] the command line is wrong; the first rank of this machine says where\n")
        if world_size > 1:
            # The rank that speaks is the first to end, so that it is the one that torchrun names.
            time.sleep(OTHERS_SPEAK_S if speaks else 2 * OTHERS_SPEAK_S)
        return 2
    training.set()
    _end_on_signals(rank)
    try:
        return train(config)
    except Exception as error:  # what goes wrong in training is told there; this comes of importing what it needs
        brief = f"{type(error).__name__} while starting"
        tell_torchrun(brief)
        if speaks:  # what is installed is the same for all ranks of a machine
            text = misfit(error) or "".join(traceback.format_exception(error)).rstrip()
            sys.stderr.write(f"[rank {rank}] while starting: {text}\n")
            time.sleep(OTHERS_SPEAK_S if world_size > 1 else 0)
        else:
            sys.stderr.write(f"[rank {rank}] {brief}: {str(error).partition(chr(10))[0]}\n")
            time.sleep(2 * OTHERS_SPEAK_S)
        return 1


def _end_on_signals(rank: int) -> None:
    """A signal while torch is imported ends the process with a line; megasnn.process.signals takes over after that."""

    def end(number: int, frame: object) -> None:
        sys.stderr.write(f"[rank {rank}] told to stop ({signal.Signals(number).name}) while starting\n")
        os._exit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
