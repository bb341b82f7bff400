"""A driver's error on one of two ranks: told once and with its place, and nothing asks the GPU for more."""

from __future__ import annotations

from tests.faults.driver import ASKED_AGAIN, LOST
from tests.faults.launch import TINY, Ended, Ranks

SECONDS = 10.0  # until all have ended, from when the GPU was lost; 5.02 was seen on two busy cores
MODEL = (*TINY, "--neuron-backend", "torch")  # nothing has to be compiled


def ended(tmp_path, fault: str, rank: int, *flags: str) -> Ended:
    ranks = Ranks(tmp_path, 2, *MODEL, *flags, fault=(fault, rank))
    found = ranks.end(90)
    lost = float(ranks.pid_file.with_suffix(".lost").read_text())
    assert ranks.started + found.seconds - lost < SECONDS
    return found


def require_told_once(found: Ended, rank: int, place: str) -> None:
    """By the rank itself."""
    assert found.status == [1, 1], found.output
    text = "".join(found.output)
    lines = [line for line in found.output[rank].splitlines() if place in line]
    assert text.count(place) == 1 and lines[0].endswith(f": AcceleratorError: {LOST}"), found.output
    assert text.count("Traceback") == 1, found.output
    assert ASKED_AGAIN not in text, "something asked the broken GPU, or hid its first error"


def test_beside_a_replica_with_a_trace_and_a_save(tmp_path) -> None:
    flags = ("--global-batch-size", "8", "--profile-step", "2", "--tensorboard-dir", str(tmp_path / "board"))
    flags += ("--save", str(tmp_path / "run"), "--save-interval", "1", "--async-save")
    found = ended(tmp_path, "lose_the_gpu", 1, *flags)
    require_told_once(found, 1, "rank 1, pipeline stage 0, action 0F1, micro-batch 1")
