"""Whole runs on ranks that share micro-batches by samples: what they tell, and going on from what they have saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megasnn.checkpoint.folder import list_checkpoints
from megasnn.checkpoint.format import read_metadata
from megasnn.checkpoint.load import load_global_tensors
from tests.training.runs import train, without_trial

CP2 = ("--context-parallel-size", "2")
FP64 = ("--precision", "fp64", "--micro-batch-size", "3", "--global-batch-size", "8")


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def trained(cache: str, *flags: str) -> None:
    with without_trial():
        train(cache, *FP64, *flags)


def test_context_then_tensor_then_data(ranks, cache, tmp_path) -> None:
    """Of ranks that own rows, too; to what a run without a stop comes to."""
    common = ("--train-iters", "4", "--neuron", "plif", "--ema-decay", "0.5", "--eval-iters", "0")
    trained(cache, *common, "--save", str(tmp_path / "straight"))
    folder = ("--load", str(tmp_path / "run"), "--save", str(tmp_path / "run"))
    ranks(2, trained, cache, *common, *folder, *CP2, "--use-distributed-optimizer", "--exit-interval", "1")
    ranks(2, trained, cache, *common, *folder, "--tensor-model-parallel-size", "2", "--exit-interval", "2")
    ranks(2, trained, cache, *common, *folder, "--exit-interval", "3")
    ranks(4, trained, cache, *common, *folder, *CP2, "--use-distributed-optimizer")
    assert list_checkpoints(tmp_path / "run") == [1, 2, 3, 4]
    assert read_metadata(tmp_path / "run" / "iter_0000001").layout["cp"] == 2
    ours, theirs = (load_global_tensors(tmp_path / name, with_optimizer=True) for name in ("run", "straight"))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert (ours[name].double() - value.double()).norm() <= 1e-9 * value.double().norm(), name


def log_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {kind: [line for line in lines if line["kind"] == kind] for kind in {line["kind"] for line in lines}}


@pytest.mark.parametrize("cut", ["samples", "rows"])
def test_what_is_told_is_what_one_rank_tells(ranks, cache, tmp_path, cut: str) -> None:
    """Loss, accuracy, evaluation, and the spikes of all samples; and how micro-batches are shared."""
    common = ("--train-iters", "4", "--log-interval", "2", "--eval-interval", "2")
    comparing = ("--check-replicas-interval", "2")
    trained(cache, *common, "--tensorboard-dir", str(tmp_path / "one"))
    ranks(
        4,
        trained,
        cache,
        *common,
        *comparing,
        *CP2,
        "--context-parallel-cut",
        cut,
        "--tensorboard-dir",
        str(tmp_path / "four"),
    )
    one, four = log_of(tmp_path / "one"), log_of(tmp_path / "four")
    assert len(four["iteration"]) == 2
    for ours, theirs in zip(four["iteration"], one["iteration"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], 1e-9) and ours["accuracy"] == theirs["accuracy"]
        assert ours["layers"].keys() == theirs["layers"].keys() != set()
        for name, shares in theirs["layers"].items():
            assert ours["layers"][name] == pytest.approx(shares, rel=1e-12), name
    for ours, theirs in zip(four["validation"], one["validation"], strict=True):
        assert (ours["samples"], ours["top1"]) == (theirs["samples"], theirs["top1"])
    (start,) = four["start"]
    assert start["ranks"] == 4
    events = EventAccumulator(str(tmp_path / "four")).Reload()
    for group in ("cp", "dp"):
        assert events.Scalars(f"7_communication/{group}_mb")[-1].value > 0
