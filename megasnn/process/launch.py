"""How the pretrain scripts begin: the command line, checked on every rank before torch is imported."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from typing import TypeVar

from megasnn.config import ConfigError, PretrainConfig
from megasnn.process.early import end_without_a_line, signals_end_it
from megasnn.process.terminal import keep_going
from megasnn.process.torchrun import tell_torchrun

# torchrun stops the other ranks as soon as the first one ends, and they may be slower to say what is wrong.
OTHERS_SPEAK_S = 3.0

Config = TypeVar("Config", bound=PretrainConfig)


def launch(read: Callable[[bool], Config], train: Callable[[Config], int]) -> int:
    """Reads the configuration, then trains; the exit status, 2 for one that cannot work.

    A mistake in the flags is reported at once by the first rank of each machine, since each machine has a command line
    of its own; the other ranks refer to it.

    Args:
        read: makes the configuration of a command line, or raises ConfigError for one that cannot work; told whether
            this rank may print the help or an error.
        train: where torch should be imported.
    Raises:
        SystemExit: after the help.
    """
    with signals_end_it():  # megasnn.process.signals takes over when the ranks join
        return _launched(read, train)


def _launched(read: Callable[[bool], Config], train: Callable[[Config], int]) -> int:
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
            brief = "the command line is wrong"
            told = str(error) if isinstance(error, ConfigError) else f"{brief}: see the help above"
            tell_torchrun(brief, told)
            sys.stderr.write(f"[rank {rank}] {error}\n" if isinstance(error, ConfigError) else "")
        else:
            sys.stderr.write(f"[rank {rank}] the command line is wrong; the first rank of this machine says where\n")
        end_without_a_line()
        if world_size > 1:
            # The rank that speaks is the first to end, so that it is the one that torchrun names.
            time.sleep(OTHERS_SPEAK_S if speaks else 2 * OTHERS_SPEAK_S)
        return 2
    training.set()
    try:
        return train(config)
    except Exception as error:  # what goes wrong in training is told there; this comes of importing what it needs
        brief = f"{type(error).__name__} while starting"
        text = misfit(error) or "".join(traceback.format_exception(error)).rstrip()
        tell_torchrun(brief, text)
        if speaks:  # what is installed is the same for all ranks of a machine
            sys.stderr.write(f"[rank {rank}] while starting: {text}\n")
            time.sleep(OTHERS_SPEAK_S if world_size > 1 else 0)
        else:
            sys.stderr.write(f"[rank {rank}] {brief}: {str(error).partition(chr(10))[0]}\n")
            time.sleep(2 * OTHERS_SPEAK_S)
        return 1


# In pip's one pass they fit (pyproject.toml). A later `pip install` of one of them, or torch from PyTorch's index for
# CPUs beside a torchvision from PyPI, leaves builds that do not.
_COMPANIONS = ("torch", "torchvision", "torchaudio")
_SIGNS = re.compile(r"torchvision|torchaudio|libtorch|libc10|libcudart|undefined symbol")


def misfit(error: BaseException) -> str | None:
    """A sentence for an error of an import that comes of builds that do not fit; None for any other error."""
    if not isinstance(error, ImportError | OSError | RuntimeError) or not _SIGNS.search(str(error)):
        return None
    cause = str(error).splitlines()[0]
    installed = ", ".join(f"{name} {_version(name)}" for name in _COMPANIONS)
    return (
        f"the installed {installed} do not load together ({cause}). Install them again in one command and from one "
        f"index, in versions of one row of the README's table: pip install --force-reinstall torch==... "
        f"torchvision==... torchaudio==...; or remove the other two, which megasnn itself does not need: "
        f"pip uninstall torchvision torchaudio"
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(none)"
