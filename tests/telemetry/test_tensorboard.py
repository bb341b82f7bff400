"""TensorBoard's files as its own reader sees them. Where they cannot be written: tests/training/test_callbacks.py."""

from __future__ import annotations

import re
from math import isnan, nan
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megasnn.telemetry.log import BestEffort
from megasnn.telemetry.tensorboard import GROUPS, TensorBoard, card

LOSS = "1_training/1_loss"


def read(directory: Path) -> EventAccumulator:
    return EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()


def points(directory: Path, tag: str = LOSS) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(directory).Scalars(tag)]


def test_a_resumed_run_replaces_what_came_after_the_checkpoint(tmp_path) -> None:
    first = TensorBoard(tmp_path, BestEffort(print))
    for iteration in (1, 2, 3, 4):
        first.scalars({"training/loss": 1.0}, iteration)
    first.close()
    again = TensorBoard(tmp_path, BestEffort(print), continued_iteration=2)
    again.scalars({"training/loss": 2.0}, 3)
    again.close()
    assert points(tmp_path) == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_cards_come_in_the_order_they_are_looked_at() -> None:
    cards = [card(f"{group}/{name}") for group, names in GROUPS.items() for name in (*names, "zzz")]
    assert cards == sorted(cards)
    assert cards[:4] == [LOSS, "1_training/2_accuracy", "1_training/3_samples_per_second", "1_training/4_grad_norm"]
    for name in ("loss", "elsewhere/loss", "training/"):
        with pytest.raises(ValueError, match=re.escape(repr(name))):
            card(name)


def test_scalars_stand_against_iterations_nan_as_it_is_and_those_only_ever_zero_are_not_shown(tmp_path) -> None:
    board = TensorBoard(tmp_path, BestEffort(print))
    for iteration, loss in enumerate((1.0, 0.5, nan), 1):
        board.scalars({"training/loss": loss, "data/skipped_samples": iteration // 2, "data/never": 0.0}, iteration)
    board.scalars({"data/skipped_samples": 0.0}, 4)
    board.close()
    assert sorted(read(tmp_path).Tags()["scalars"]) == [LOSS, "8_data/skipped_samples"]
    assert points(tmp_path)[:2] == [(1, 1.0), (2, 0.5)] and isnan(points(tmp_path)[2][1])
    assert points(tmp_path, "8_data/skipped_samples") == [(2, 1.0), (3, 1.0), (4, 0.0)]
