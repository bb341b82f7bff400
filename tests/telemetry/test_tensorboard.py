from __future__ import annotations

from math import isnan, nan
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megasnn.telemetry.tensorboard import TensorBoard


def read(directory: Path) -> EventAccumulator:
    return EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()


def points(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_every_scalar_is_there_on_both_axes(tmp_path):
    board = TensorBoard(tmp_path)
    for iteration in (1, 2, 3):
        board.scalars({"loss": 1.0 / iteration, "validation/top1": 0.5}, iteration, 64 * iteration)
    board.close()
    events = read(tmp_path)
    assert sorted(events.Tags()["scalars"]) == [
        "loss", "loss vs samples", "validation/top1", "validation/top1 vs samples",
    ]  # fmt: skip
    assert points(events, "loss")[:2] == [(1, 1.0), (2, 0.5)]
    assert points(events, "loss vs samples")[:2] == [(64, 1.0), (128, 0.5)]


def test_nan_is_written(tmp_path):
    board = TensorBoard(tmp_path)
    board.scalars({"loss": nan}, 1, 64)
    board.close()
    assert isnan(points(read(tmp_path), "loss")[0][1])


def test_text_and_flush_make_it_readable_while_the_run_goes_on(tmp_path):
    board = TensorBoard(tmp_path)
    board.text("config", "| lr | 0.001 |")
    board.flush()
    (event,) = read(tmp_path).Tensors("config/text_summary")
    assert event.tensor_proto.string_val == [b"| lr | 0.001 |"]
    board.close()


def test_a_resumed_run_replaces_what_came_after_the_checkpoint(tmp_path):
    first = TensorBoard(tmp_path)
    for iteration in (1, 2, 3, 4):
        first.scalars({"loss": 1.0}, iteration, 64 * iteration)
    first.close()
    again = TensorBoard(tmp_path, resumed_iteration=2, resumed_samples=128)
    again.scalars({"loss": 2.0}, 3, 192)
    again.close()
    events = read(tmp_path)
    assert points(events, "loss") == [(1, 1.0), (2, 1.0), (3, 2.0)]
    assert points(events, "loss vs samples") == [(64, 1.0), (128, 1.0), (192, 2.0)]

    third = TensorBoard(tmp_path, resumed_iteration=3, resumed_samples=192)
    third.close()
    assert points(read(tmp_path), "loss vs samples") == [(64, 1.0), (128, 1.0), (192, 2.0)]


def test_resuming_into_a_new_directory(tmp_path):
    board = TensorBoard(tmp_path / "new", resumed_iteration=5, resumed_samples=320)
    board.scalars({"loss": 0.5}, 6, 384)
    board.close()
    assert points(read(tmp_path / "new"), "loss") == [(6, 0.5)]


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    board = TensorBoard(None, resumed_iteration=1, resumed_samples=64)
    board.scalars({"loss": 1.0}, 1, 64)
    board.text("config", "text")
    board.flush()
    board.close()
    assert list(tmp_path.iterdir()) == []
