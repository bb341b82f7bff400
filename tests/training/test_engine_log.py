"""Logs of a loop of one's own: those of a run."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

import megasnn
from megasnn.models.spikformer.model import Spikformer
from tests.training.runs import log_of

MODEL = Spikformer(
    image_size=8, in_channels=1, num_classes=10, patch_size=4, embed_dim=32, depth=1, num_heads=4, time_steps=2,
    mlp_ratio=2,
)  # fmt: skip
SIZES = {"micro_batch_size": 4, "global_batch_size": 8, "train_iters": 5, "lr": 1e-2}


def train(folder: Path | None, steps: int = 5, callbacks: tuple[megasnn.Callback, ...] = ()) -> None:
    images, labels = torch.rand(8, *MODEL.input_shape), torch.arange(8)
    with megasnn.Engine(MODEL, **SIZES) as engine:
        with megasnn.EngineLog(engine, folder, log_interval=2, epoch_samples=16, callbacks=callbacks) as log:
            for _ in range(steps):
                log.step(engine.train_step(images, labels))
            log.evaluation(engine.evaluate(images, labels))


def test_a_loop_has_the_logs_of_a_run(tmp_path: Path) -> None:
    kept = mock.Mock(spec=megasnn.Callback)
    train(tmp_path, callbacks=(kept,))
    lines = log_of(tmp_path, "iteration")
    assert [line["iteration"] for line in lines] == [2, 4, 5] and lines[1]["epoch"] == 2.0
    # Spikes are those of the logged step.
    assert all(0 < layer["firing_rate"] <= 1 for line in lines for layer in [line["layers"]["blocks.0.mlp.fc1.neuron"]])
    (first,) = log_of(tmp_path, "message")
    assert first["text"].startswith("first step, iteration 1: loss ")
    (start,), (evaluation,) = log_of(tmp_path, "start"), log_of(tmp_path, "validation")
    assert start["config"]["optimizer"]["lr"] == 1e-2 and evaluation["iteration"] == 5
    names = [name for name, *_ in kept.method_calls]
    steps = ["step", "step", "log", "step", "step", "log", "step", "log"]
    assert names == ["start", *steps, "evaluation", "end"]


def test_tensorboard_compares_runs_by_their_flags(tmp_path: Path) -> None:
    train(tmp_path)
    events = EventAccumulator(str(tmp_path)).Reload()
    contents = {
        name.removeprefix("_hparams_/"): HParamsPluginData.FromString(metadata.plugin_data.content)
        for name, metadata in events.summary_metadata.items()
        if name.startswith("_hparams_/")
    }
    flags = contents["session_start_info"].session_start_info.hparams
    assert flags["lr"].number_value == 1e-2 and flags["optimizer"].string_value == "adamw"
    compared = [metric.name.tag for metric in contents["experiment"].experiment.metric_infos]
    assert "2_validation/2_accuracy_top1" in compared and set(compared) <= set(events.Tags()["scalars"])


def two_ranks(folder: str) -> None:
    train(Path(folder))


def test_one_rank_of_several_writes(ranks, tmp_path: Path) -> None:
    ranks(2, two_ranks, str(tmp_path))
    assert [line["iteration"] for line in log_of(tmp_path, "iteration")] == [2, 4, 5]


def test_a_training_without_length_is_refused() -> None:
    flags = {name: value for name, value in SIZES.items() if name != "train_iters"}
    with megasnn.Engine(MODEL, **flags, lr_decay_style="constant") as engine:
        with pytest.raises(ValueError, match="train_iters"):
            megasnn.EngineLog(engine)
    with megasnn.Engine(MODEL, **SIZES) as engine:
        with pytest.raises(ValueError, match="log_interval.*0"):
            megasnn.EngineLog(engine, log_interval=0)
