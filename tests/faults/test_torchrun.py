"""The launcher of the scripts: torchrun's flags and exit status, and one line where torchrun prints some 55."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.launch import ROOT

# Ranks that import nothing large. Rank 1 ends first.
RANKS = {
    "failed": (
        "from megasnn.process.torchrun import tell_torchrun\n"
        "if rank == 1: tell_torchrun('OSError while saving', 'OSError while saving: the disk\\nis full'); sys.exit(1)\n"
        "time.sleep(30)",
        "torchrun: stopped, because of rank 1: OSError while saving\n",
    ),
    "silent": (
        "if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(30)",
        "torchrun: stopped, because of rank 1: ended with signal SIGKILL\n",
    ),
}


def ended_under(launcher: str, folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    script = folder / "ranks.py"
    script.write_text(f"import os, sys, time\nrank = int(os.environ['RANK'])\n{code}\n")
    command = [sys.executable, "-m", launcher, "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", RANKS)
def test_one_line_and_the_status(tmp_path: Path, name: str) -> None:
    code, said = RANKS[name]
    ended = ended_under("megasnn.process.torchrun", tmp_path, code)
    assert (ended.returncode, ended.stderr) == (1, said)


def test_the_last_lines_of_plain_torchrun_hold_the_whole_error(tmp_path: Path) -> None:
    ended = ended_under("torch.distributed.run", tmp_path, RANKS["failed"][0])
    *_, error, more, rule = ended.stderr.splitlines()
    assert ended.returncode == 1 and set(rule) == {"="}
    assert (error, more) == ("  traceback : OSError while saving: the disk", "  is full")
