"""SIGTERM, SIGINT and SIGUSR1 to any rank: all save at the end of the step and end; a second one ends at once."""

from __future__ import annotations

import signal
import time

import pytest

from megasnn.checkpoint.folder import list_checkpoints
from tests.faults.launch import ENDLESS, PP2, TINY, TP2, Ranks


@pytest.mark.parametrize(
    ("number", "signalled", "flags"),
    [
        (signal.SIGTERM, [1], PP2),
        (signal.SIGUSR1, [0, 1], (*TP2, "--async-save", "--save-interval", "1")),  # as a launcher passes it on
    ],
)
def test_the_run_is_saved_and_ends_well(tmp_path, number, signalled, flags) -> None:
    folder = tmp_path / "run"
    ranks = Ranks(tmp_path / "ranks", 2, *TINY, *flags, *ENDLESS, "--save", str(folder))
    ranks.wait_for("iteration      3/")
    ranks.kill(number, *signalled)
    ended = ranks.end()
    assert ended.status == [0, 0]
    assert "Traceback" not in "".join(ended.output)
    reached = int(ended.output[0].split("asked to stop: the run ends at iteration ")[1].split()[0])
    assert list_checkpoints(folder)[-1] == reached


def test_a_second_signal_ends_at_once(tmp_path) -> None:
    """In a step that does not end; a repetition within a second is the launcher's, and still the first one."""
    ranks = Ranks(tmp_path, 2, *TINY, *PP2, fault=("stall_in_step", 0))
    ranks.kill_stalled(signal.SIGINT)
    ranks.wait_for("once more ends it at once")
    ranks.kill(signal.SIGTERM, 0)
    time.sleep(1.2)
    assert all(process.is_alive() for process in ranks.processes)
    ranks.kill(signal.SIGTERM, 0)
    assert ranks.end(10).status == [128 + signal.SIGTERM, 1]
