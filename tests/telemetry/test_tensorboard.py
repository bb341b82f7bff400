"""TensorBoard's files as its own reader sees them, and what happens where they cannot be written."""

from __future__ import annotations

import re
from math import isnan, nan
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megasnn.telemetry.log import BestEffort
from megasnn.telemetry.tensorboard import GROUPS, TensorBoard, card
from tests.small_disk import fill, small_disk

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
    again = TensorBoard(tmp_path, BestEffort(print), resumed_iteration=2)
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


def test_files_that_cannot_be_written_are_told_once_and_end_nothing(tmp_path) -> None:
    told: list[str] = []
    with small_disk(tmp_path / "disk", "128k") as disk:
        board = TensorBoard(disk / "board", BestEffort(told.append))
        fill(disk)
        for iteration in range(1, 1000):
            board.scalars({f"spikes/layer{i}": 0.1 for i in range(20)}, iteration)
            board.picture("samples", lambda: np.zeros((2, 2, 3), np.uint8), 3)
            if iteration % 10 == 0:
                board.flush()
        board.close()
    assert len(told) == 1 and str(disk) in told[0]
