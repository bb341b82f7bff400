"""Events that cannot be written now are told once and written later; nothing is lost and nothing raises."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megasnn.telemetry.event_file import EventFile, EventWriter
from megasnn.telemetry.tensorboard import TensorBoard
from megasnn.telemetry.tried import Tried
from tests.small_disk import fill, small_disk


def steps(folder: Path, tag: str = "1_training/1_loss") -> list[int]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return [event.step for event in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []


def write(board: TensorBoard, iterations: range, samples: int = 10) -> None:
    """As a run does: many scalars, then a flush."""
    for iteration in iterations:
        rates = {f"spikes/layer{i}": 0.1 for i in range(20)}
        board.scalars({"training/loss": 1.0, **rates}, iteration, samples * iteration)
        board.flush()


@pytest.mark.parametrize("free", [0, 4096])
def test_a_full_disk_that_has_room_again(tmp_path, free) -> None:
    """With a page left the disk takes part of an event first, which must not stay."""
    with small_disk(tmp_path / "disk", "256k") as disk:
        told: list[str] = []
        board = TensorBoard(disk / "board", tell=told.append)
        write(board, range(1, 3))
        ballast = fill(disk, free)
        write(board, range(3, 13))
        assert len(told) == 1 and "No space left on device" in told[0] and str(disk) in told[0], told
        before = steps(disk / "board")
        assert before[:2] == [1, 2] and before == list(range(1, len(before) + 1)) and len(before) < 12
        ballast.unlink()
        write(board, range(13, 15))
        board.close()
        assert steps(disk / "board") == list(range(1, 15)) and len(told) == 2 and "works again" in told[1]


def test_a_folder_that_is_removed(tmp_path) -> None:
    told: list[str] = []
    board = TensorBoard(tmp_path / "board", tell=told.append)
    write(board, range(1, 3))
    shutil.rmtree(tmp_path / "board")
    write(board, range(3, 5))
    board.close()
    assert steps(tmp_path / "board") == [3, 4] and told == []


def test_a_folder_that_cannot_be_made_yet(tmp_path) -> None:
    (tmp_path / "mounted").write_text("a file where a folder should be")
    told: list[str] = []
    board = TensorBoard(tmp_path / "mounted" / "board", resumed_iteration=2, resumed_samples=20, tell=told.append)
    write(board, range(3, 5))
    assert len(told) == 1 and "NotADirectoryError" in told[0]
    (tmp_path / "mounted").unlink()
    write(board, range(5, 6))
    board.close()
    assert steps(tmp_path / "mounted" / "board") == [3, 4, 5]


def test_a_disk_that_is_read_only_for_a_while(tmp_path) -> None:
    with small_disk(tmp_path / "disk", "256k") as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        told: list[str] = []
        board = TensorBoard(disk / "board", tell=told.append)
        write(board, range(1, 3))
        assert len(told) == 1 and "Read-only file system" in told[0]
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        board.close()
        assert steps(disk / "board") == [1, 2] and len(told) == 2


def test_earlier_events_that_cannot_be_read(tmp_path) -> None:
    (tmp_path / "events.out.tfevents.1").mkdir()
    told: list[str] = []
    board = TensorBoard(tmp_path, resumed_iteration=2, resumed_samples=20, tell=told.append)
    write(board, range(3, 5))
    board.close()
    assert len(told) == 1 and "earlier events" in told[0]
    (tmp_path / "events.out.tfevents.1").rmdir()
    assert steps(tmp_path) == [3, 4]


def test_a_picture_that_cannot_be_drawn(tmp_path) -> None:
    def fail() -> np.ndarray:
        raise ValueError("no font")

    told: list[str] = []
    board = TensorBoard(tmp_path, tell=told.append)
    for iteration in (1, 2):
        board.picture("samples", fail, iteration)
    board.picture("samples", lambda: np.zeros((2, 2, 3), np.uint8), 3)
    board.close()
    assert len(told) == 2 and "'samples'" in told[0] and "no font" in told[0] and "works again" in told[1]
    assert len(EventAccumulator(str(tmp_path)).Reload().Images("samples")) == 1
    TensorBoard(None).picture("samples", fail, 1)  # the ranks that do not write do not draw


def test_what_waits_is_bounded_and_the_oldest_goes_first(tmp_path) -> None:
    writer = EventWriter(str(tmp_path))
    writer.file_writer.event_writer = EventFile(str(tmp_path), None, most_waiting_bytes=1000)
    for step in range(100):
        writer.add_scalar("loss", 0.0, step)
    writer.close()
    kept = steps(tmp_path, "loss")
    assert kept == list(range(kept[0], 100)) and 10 < len(kept) < 30


def test_what_is_to_be_done_once_is_tried_until_it_succeeds(tmp_path) -> None:
    told: list[str] = []
    tried, calls = Tried(told.append), []

    def work() -> None:
        calls.append(1)
        if len(calls) < 3:
            raise OSError("not yet")

    tried.until_done("writing config.json", work)
    for _ in range(4):
        tried.again()
    assert len(calls) == 3 and len(told) == 2 and "not yet" in told[0] and "works again" in told[1]
