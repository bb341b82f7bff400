"""Ctrl-C while a program starts: one line from it, no traceback, and the status that docs/restarts.md names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.launch import ROOT, TINY

# Stands for a module that takes long to import, and says when it began. Found before the real one.
SLOW = """
import os, pathlib, time
pathlib.Path(os.environ["IMPORTING"], os.environ.get("RANK", "0")).touch()
time.sleep(60)
"""
PROGRAM = (str(ROOT / "pretrain_spikformer.py"), *TINY)
LAUNCHER = ("-m", "megasnn.process.torchrun", "--standalone", "--nproc-per-node", "2")


def started(arguments: Sequence[str], **variables: str) -> subprocess.Popen[str]:
    """Python with these arguments, in a group of its own. It listens to SIGINT: behind `&` a shell starts programs that
    ignore it, and these tests may be one."""
    listens = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)"
    command = f"{listens}; import os, sys; os.execv(sys.executable, [sys.executable, *{list(arguments)!r}])"
    return subprocess.Popen(
        [sys.executable, "-c", command],
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(folder: Path, slow: str, *arguments: str, ranks: int = 1) -> tuple[int, list[str]]:
    """Status and lines of Python with these arguments, interrupted with its group while so many ranks import `slow`."""
    (folder / f"{slow}.py").write_text(SLOW)
    importing = folder / "importing"
    importing.mkdir()
    with started(arguments, PYTHONPATH=f"{folder}:{ROOT}", IMPORTING=str(importing)) as process:
        try:
            while len(list(importing.iterdir())) < ranks:
                assert process.poll() is None
                time.sleep(0.02)
            os.killpg(process.pid, signal.SIGINT)
            output, _ = process.communicate(timeout=20)
        finally:
            process.kill()
    return process.returncode, output.splitlines()


@pytest.mark.parametrize("slow", ["pydantic", "torch"])
@pytest.mark.parametrize("program", [PROGRAM, ("-m", "megasnn", "spikformer", *TINY)], ids=["script", "package"])
def test_one_process(tmp_path, slow, program) -> None:
    """Before the flags are read, and when what the model needs is imported to check them."""
    assert ended(tmp_path, slow, *program) == (130, ["[rank 0] told to stop (SIGINT) while starting"])


def test_the_launcher(tmp_path) -> None:
    assert ended(tmp_path, "torch", *LAUNCHER, *PROGRAM) == (1, ["torchrun: told to stop (SIGINT) while starting"])


def test_ranks(tmp_path) -> None:
    """The launcher does not need what is slow here; Ctrl-C comes to all ranks, and the first one speaks."""
    status, lines = ended(tmp_path, "pydantic", *LAUNCHER, *PROGRAM, ranks=2)
    assert status == 1 and lines[-1] == "torchrun: stopped, because of SIGINT"
    assert [line for line in lines if "while starting" in line] == ["[rank 0] told to stop (SIGINT) while starting"]
    assert not [line for line in lines if "Traceback" in line or "KeyboardInterrupt" in line]


WAITS = """
import os, pathlib, time
pathlib.Path(os.environ["RUNNING"], str(os.getpid())).touch()
time.sleep(60)
"""


def test_a_launcher_that_was_told_not_to_take_sigint_leaves_no_rank_behind(tmp_path) -> None:
    program, running = tmp_path / "waits.py", tmp_path / "running"
    program.write_text(WAITS)
    running.mkdir()
    arguments = *LAUNCHER, "--signals-to-handle", "SIGTERM", str(program)
    with started(arguments, PYTHONPATH=str(ROOT), RUNNING=str(running)) as process:
        try:
            while len(ranks := [int(each.name) for each in running.iterdir()]) < 2:
                assert process.poll() is None
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            told, _ = process.communicate(timeout=40)
        finally:
            process.kill()
    assert process.returncode == 1 and told.splitlines()[-1] == "torchrun: stopped, because of SIGINT"
    assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
