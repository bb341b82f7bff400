"""Costs of layers that one start measures and the next one reads."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from megasnn.config import PretrainConfig, TrainingConfig
from megasnn.layers import BuildContext
from megasnn.models.build import describe_model
from megasnn.models.model import run_config
from megasnn.models.spikformer.model import Spikformer
from megasnn.pipeline import kept_costs
from megasnn.pipeline.cost_model import LayerCost, LinkCost, PipelineCosts
from megasnn.pipeline.kept_costs import pipeline_costs
from tests.training.runs import log_of, train

Measured = Callable[..., tuple[PipelineCosts, int]]


def config_of(**values: object) -> PretrainConfig:
    model = Spikformer(image_size=8, in_channels=1, num_classes=10, embed_dim=32, depth=1, num_heads=4, time_steps=2)
    return run_config(Spikformer)(model=replace(model, **values))


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measured:
    """Costs of a start, and the number of measurements for them."""
    monkeypatch.setenv("MEGASNN_CACHE", str(tmp_path))

    def measured(config: PretrainConfig) -> tuple[PipelineCosts, int]:
        context = BuildContext()
        description = describe_model(config.model)
        costs = PipelineCosts(tuple(LayerCost(0.5, 1 / 3, 2.0, 7) for _ in description.layers), LinkCost(1e-5, 1e-9))
        with mock.patch.object(kept_costs, "profile_pipeline", return_value=costs) as profile:
            found = pipeline_costs(description, description.build(context), config, context)
        return found, profile.call_count

    return measured


def files(folder: Path) -> list[Path]:
    return sorted((folder / "layer_costs").glob("*.json"))


def test_the_second_start_reads_the_costs_of_the_first(measured: Measured, tmp_path: Path) -> None:
    first, measurements = measured(config_of())
    assert measurements == 1 and not first.kept_in
    second, measurements = measured(config_of())
    (file,) = files(tmp_path)
    assert measurements == 0 and second == replace(first, kept_in=str(file))


def test_costs_of_another_run_are_measured(measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(config_of())
    runs = [
        config_of(embed_dim=64),
        replace(config_of(), training=TrainingConfig(micro_batch_size=4)),
        replace(config_of(), training=TrainingConfig(precision="bf16")),
    ]
    assert [measured(config)[1] for config in runs] == [1, 1, 1] and len(files(tmp_path)) == 4
    for name, value in (("processor_name", lambda: "another"), ("VERSION", "9.9")):
        monkeypatch.setattr(kept_costs, name, value)
        assert measured(config_of())[1] == 1
    monkeypatch.undo()


def test_a_changed_source_is_measured_again(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(config_of())
    monkeypatch.setattr(kept_costs.inspect, "getfile", lambda each: __file__)
    assert measured(config_of())[1] == 1
    # A class of a notebook is in no file: nothing is kept.
    monkeypatch.setattr(kept_costs.inspect, "getfile", mock.Mock(side_effect=TypeError("built-in")))
    assert [measured(config_of())[1] for _ in range(2)] == [1, 1]


@pytest.mark.parametrize("damage", ["cut", "of another run", "negative", "nan", "a folder"])
def test_a_broken_or_foreign_file_is_ignored_with_a_sentence(measured: Measured, tmp_path: Path, damage: str) -> None:
    costs, _ = measured(config_of())
    (file,) = files(tmp_path)
    text = file.read_text()
    values = json.loads(text)
    if damage == "a folder":
        file.unlink()
        file.mkdir()
    elif damage == "cut":
        file.write_text(text[:-20])
    else:
        if damage == "of another run":
            values["depends_on"]["samples"] += 1
        else:
            values["layers"][0]["working"][1] = -1 if damage == "negative" else float("nan")
        file.write_text(json.dumps(values))
    with pytest.warns(UserWarning, match=f"measured again.*{file.name}") as warned:
        again, measurements = measured(config_of())
    assert measurements == 1 and again == costs
    if damage != "a folder":
        assert len(warned) == 1
        with warnings.catch_warnings(action="error"):
            assert measured(config_of())[1] == 0  # the new costs have replaced it


PIPELINE = "--train-iters 1 --pipeline-model-parallel-size 2 --eval-iters 0 --save".split()


def start(cache: str, folder: str) -> None:
    train(cache, *PIPELINE, folder)


def test_all_ranks_of_a_run_take_the_kept_costs(ranks, tmp_path: Path) -> None:
    outcomes = []
    for name in ("first", "second"):
        ranks(2, start, str(tmp_path / "cache"), str(tmp_path / name))
        (entry,) = log_of(tmp_path / name, "start")
        told = [line["text"] for line in log_of(tmp_path / name, "message") if "earlier start" in line["text"]]
        outcomes.append((entry["layout"], entry["costs"], len(told)))
    (layout, costs, told), (same_layout, same_costs, told_again) = outcomes
    assert (layout, costs) == (same_layout, same_costs) and (told, told_again) == (0, 1)
