"""A server from which the tests fork processes that have imported, and loaded, what every rank needs."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryDirectory

# The first optimizer imports torch._dynamo, which takes longer than torch itself.
_PRELOADED = ["torch", "torch._dynamo", "spikingjelly.activation_based.neuron", "tests.loaded"]


@cache
def forking() -> ForkServerContext:
    """Processes of this context start at once: the server has imported everything when this returns."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    first = context.Process(target=_nothing)
    first.start()
    first.join()
    return context


def _nothing() -> None:
    pass


def run_program(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """`python WORDS` in a folder, a script or -m and a module with flags, without seconds of imports."""
    with TemporaryDirectory() as written:
        files = [Path(written, name) for name in ("out", "err")]
        process = forking().Process(target=_run, args=(folder, [*map(str, words)], files, dict(os.environ)))
        process.start()
        process.join(120)
        assert process.exitcode is not None, f"{words} has not ended"
        return subprocess.CompletedProcess(words, process.exitcode, *(file.read_text() for file in files))


def _run(folder: Path, words: list[str], files: list[Path], environment: dict[str, str]) -> None:
    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
