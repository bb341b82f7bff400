from __future__ import annotations

import re
from math import isnan, nan
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megasnn.telemetry.event_file import EventWriter
from megasnn.telemetry.tensorboard import BY_SAMPLES, GROUPS, TensorBoard, card, charts

LOSS = "1_training/1_loss"


def read(directory: Path) -> EventAccumulator:
    return EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()


def points(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_every_scalar_is_there_on_both_axes(tmp_path):
    board = TensorBoard(tmp_path)
    for iteration in (1, 2, 3):
        board.scalars({"training/loss": 1.0 / iteration, "spikes/other": 0.5}, iteration, 64 * iteration)
    board.close()
    events = read(tmp_path)
    assert sorted(events.Tags()["scalars"]) == [
        "1_training/1_loss", "3_spikes/other", "vs_samples/1_training/1_loss", "vs_samples/3_spikes/other",
    ]  # fmt: skip
    assert points(events, LOSS)[:2] == [(1, 1.0), (2, 0.5)]
    assert points(events, BY_SAMPLES + LOSS)[:2] == [(64, 1.0), (128, 0.5)]


def test_nan_is_written(tmp_path):
    board = TensorBoard(tmp_path)
    board.scalars({"training/loss": nan}, 1, 64)
    board.close()
    assert isnan(points(read(tmp_path), LOSS)[0][1])


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
        first.scalars({"training/loss": 1.0}, iteration, 64 * iteration)
    first.close()
    again = TensorBoard(tmp_path, resumed_iteration=2, resumed_samples=128)
    again.scalars({"training/loss": 2.0}, 3, 192)
    again.close()
    events = read(tmp_path)
    assert points(events, LOSS) == [(1, 1.0), (2, 1.0), (3, 2.0)]
    assert points(events, BY_SAMPLES + LOSS) == [(64, 1.0), (128, 1.0), (192, 2.0)]

    third = TensorBoard(tmp_path, resumed_iteration=3, resumed_samples=192)
    third.close()
    assert points(read(tmp_path), BY_SAMPLES + LOSS) == [(64, 1.0), (128, 1.0), (192, 2.0)]


def test_curves_of_an_earlier_version_stay(tmp_path):
    old = EventWriter(str(tmp_path))
    for iteration in (1, 2, 3):
        old.add_scalar("training/loss", 1.0, iteration)
        old.add_scalar("training/loss vs samples", 1.0, 64 * iteration)
    old.close()
    TensorBoard(tmp_path, resumed_iteration=2, resumed_samples=128).close()
    assert points(read(tmp_path), "training/loss vs samples") == [(64, 1.0), (128, 1.0)]


def test_resuming_into_a_new_directory(tmp_path):
    board = TensorBoard(tmp_path / "new", resumed_iteration=5, resumed_samples=320)
    board.scalars({"training/loss": 0.5}, 6, 384)
    board.close()
    assert points(read(tmp_path / "new"), LOSS) == [(6, 0.5)]


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    board = TensorBoard(None, resumed_iteration=1, resumed_samples=64)
    board.scalars({"training/loss": 1.0}, 1, 64)
    board.text("config", "text")
    board.flush()
    board.close()
    assert list(tmp_path.iterdir()) == []


def test_cards_come_in_the_order_they_are_looked_at():
    cards = [card(f"{group}/{name}") for group, names in GROUPS.items() for name in (*names, "zzz")]
    assert cards == sorted(cards)
    assert cards[:4] == [LOSS, "1_training/2_accuracy", "1_training/3_samples_per_second", "1_training/4_grad_norm"]
    assert max(cards) < BY_SAMPLES
    for name in ("loss", "elsewhere/loss", "training/"):
        with pytest.raises(ValueError, match="belongs to none of the groups training"):
            card(name)


def test_a_scalar_that_is_always_zero_has_no_card(tmp_path):
    board = TensorBoard(tmp_path)
    for iteration in range(1, 6):
        broken = float(max(iteration - 4, 0))
        board.scalars({"data/skipped_samples": broken, "data/never": 0.0}, iteration, 10 * iteration)
    board.scalars({"data/skipped_samples": 0.0}, 6, 60)
    board.close()
    events = read(tmp_path)
    tag = card("data/skipped_samples")
    assert events.Tags()["scalars"] == [tag, BY_SAMPLES + tag]
    assert points(events, tag) == [(1, 0.0), (4, 0.0), (5, 1.0), (6, 0.0)]
    assert points(events, BY_SAMPLES + tag) == [(10, 0.0), (40, 0.0), (50, 1.0), (60, 0.0)]


def test_charts_of_several_lines_find_their_scalars(tmp_path):
    board = TensorBoard(tmp_path)
    board.close()
    assert "custom_scalars__config__" in read(tmp_path).PluginTagToContent("custom_scalars")
    patterns = {title: chart[1][0] for group in charts().values() for title, chart in group.items()}
    both = [card(name) for name in ("training/loss", "validation/loss")]
    assert all(re.match(patterns["loss"], tag) for tag in both)
    assert not re.match(patterns["loss"], card("training/learning_rate"))
    assert not any(re.match(pattern, BY_SAMPLES + tag) for pattern in patterns.values() for tag in both)
    assert re.match(patterns["peak memory of each rank, MB"], card("memory/peak_mb_rank0"))


def test_flags_stand_in_the_same_run_as_the_scalars(tmp_path):
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    board = TensorBoard(tmp_path)
    board.flags({"lr": 0.1, "augment": "none", "shuffle": True}, ["training/loss"])
    board.close()
    content = read(tmp_path).PluginTagToContent("hparams")
    begun = HParamsPluginData.FromString(content["_hparams_/session_start_info"]).session_start_info.hparams
    assert begun["lr"].number_value == 0.1 and begun["augment"].string_value == "none"
    (metric,) = HParamsPluginData.FromString(content["_hparams_/experiment"]).experiment.metric_infos
    assert metric.name.tag == LOSS and metric.name.group == ""
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [], "no run of their own"
