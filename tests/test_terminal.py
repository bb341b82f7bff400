"""Printing never ends a program: a reader that leaves, a full disk, descriptors that were closed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = """
import sys
from megasnn.process.terminal import keep_going
keep_going({goes_on})
for line in range(20000):
    print(line)
sys.stderr.write("the end\\n")
"""
LOST = "WARNING: standard output cannot be written"


def shell(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `command`, in which P stands for Python with these arguments; the exit status is that of P."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = "set -o pipefail; " + command.replace("P", shlex.join([sys.executable, *arguments]), 1)
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=60)


@pytest.mark.parametrize(
    ("command", "out", "warned"),
    [
        ("P | head -1", "0\n", True),
        ("P > /dev/full", "", True),
        ("P >&-", "", False),
        ("P 2>&- | tail -1", "19999\n", None),
        ("P 2>&1 | head -1", "0\n", None),
        ("P > /dev/full 2>&1", "", None),
    ],
)
def test_a_program_goes_on(command, out, warned) -> None:
    ended = shell(command, "-c", PROGRAM.format(goes_on="lambda: True"))
    assert (ended.returncode, ended.stdout) == (0, out)
    if warned is not None:
        assert ended.stderr.count(LOST) == warned and ended.stderr.endswith("the end\n") and len(ended.stderr) < 200


def test_without_more_to_do_nothing_is_told() -> None:
    ended = shell("P | head -1", "-c", PROGRAM.format(goes_on=""))
    assert (ended.returncode, ended.stderr) == (0, "the end\n")


@pytest.mark.parametrize("program", ["pretrain_vgg_dvs.py", "tools/draw_schedule.py"])
def test_help_to_a_reader_that_leaves(program) -> None:
    ended = shell("P | head -1", str(ROOT / program), "--help")
    assert (ended.returncode, ended.stderr) == (0, "") and ended.stdout.count("\n") == 1
