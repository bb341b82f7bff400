"""From a schedule's name to a schedule that an executor can run."""

from __future__ import annotations

from collections.abc import Callable

from megasnn.schedule.actions import Schedule
from megasnn.schedule.basic import forward_only as forward_only_order
from megasnn.schedule.basic import gpipe, one_f_one_b
from megasnn.schedule.generate import GENERATED_NAMES
from megasnn.schedule.passes import insert_gradient_sync, insert_transfers
from megasnn.schedule.validate import validate

GENERATORS: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}
SCHEDULE_NAMES = ("auto", *GENERATORS)


def resolve_schedule_name(name: str) -> str:
    """What ``auto`` stands for: 1f1b, as fast as gpipe and never with more activations, on a single stage too.

    Raises ValueError for an unknown name.
    """
    if name in GENERATED_NAMES and name not in SCHEDULE_NAMES:
        raise ValueError(
            f"--pipeline-schedule {name} can be drawn and simulated (tools/draw_schedule.py) but not trained with "
            f"yet: it splits the backward or has several chunks per rank; use one of {', '.join(SCHEDULE_NAMES)}"
        )
    if name not in SCHEDULE_NAMES:
        raise ValueError(f"unknown --pipeline-schedule {name!r}; known: {', '.join(SCHEDULE_NAMES)}")
    return "1f1b" if name == "auto" else name


def refuse_chunks_per_rank(name: str, chunks_per_rank: int) -> None:
    """Raises ValueError when the schedule cannot take so many chunks on each pipeline rank."""
    if chunks_per_rank != 1:
        raise ValueError(
            f"--num-virtual-stages-per-pipeline-rank {chunks_per_rank}: --pipeline-schedule {name} computes "
            f"one chunk per pipeline rank; leave the flag at 1"
        )


def build_schedule(
    name: str, stages: int, micro_batches: int, chunks_per_rank: int = 1, forward_only: bool = False
) -> Schedule:
    """A validated schedule with transfers and gradient sync, for `stages` pipeline ranks.

    Raises ValueError for an unknown name, sizes smaller than 1, or more chunks per rank than the schedule
    can take.
    """
    for flag, value in (
        ("--pipeline-model-parallel-size", stages),
        ("number of micro-batches", micro_batches),
    ):
        if value < 1:
            raise ValueError(f"{flag} must be at least 1, got {value}")
    name = resolve_schedule_name(name)
    refuse_chunks_per_rank(name, chunks_per_rank)
    if forward_only:
        schedule = insert_transfers(forward_only_order(stages, micro_batches))
    else:
        schedule = insert_gradient_sync(insert_transfers(GENERATORS[name](stages, micro_batches)))
    validate(schedule)
    return schedule
