"""What crosses the stages of a run: bits and bytes, counted, checked, and the same function for every wire."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megasnn.layers.blocks import ResidualMLP
from tests.training.runs import Outcome, train, without_trial

PP2 = "--pipeline-model-parallel-size 2 --pipeline-schedule 1f1b --train-iters 2 --eval-iters 0".split()
IN_THE_STEM, BETWEEN_BLOCKS = "3|5", "6|2"


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def scalars(folder: Path) -> dict[str, float]:
    events = EventAccumulator(str(folder)).Reload()
    return {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize(("layout", "most"), [(IN_THE_STEM, 1 / 30), (BETWEEN_BLOCKS, 1 / 3.9)])
def test_bytes_between_stages(ranks, cache, tmp_path, layout, most) -> None:
    ranks(2, train, cache, *PP2, "--pipeline-model-parallel-layout", layout, "--tensorboard-dir", str(tmp_path))
    sent = scalars(tmp_path)
    assert 0 < sent["7_communication/pipeline_mb"] <= most * sent["7_communication/pipeline_mb_if_dense"]
    assert 0 < sent["7_communication/backward_mb"] == sent["7_communication/backward_mb_if_dense"]


def _with_a_stranger(cache: str, *flags: str) -> Outcome:
    """A run in which the last block hands on, for the third micro-batch of each step, values that are no counts."""
    forward, calls = ResidualMLP.forward, 0

    def strange(self: ResidualMLP, x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        if x.is_meta:  # the dry run
            return forward(self, x)
        calls += 1
        return forward(self, x) + 0.5 * (calls % 3 == 0)

    ResidualMLP.forward = strange  # type: ignore[method-assign]
    try:
        with without_trial():
            return train(cache, *flags)
    finally:
        ResidualMLP.forward = forward  # type: ignore[method-assign]


def _ends(cache: str, *flags: str) -> str:
    """What stops this rank. Leaving the groups is what the other rank learns it by: nobody may hold on to them."""
    try:
        _with_a_stranger(cache, *flags)
    except Exception as error:
        return str(error)
    finally:
        torch.distributed.destroy_process_group()
        gc.collect()
    return "nothing"


def test_what_does_not_fit_stops_the_run_and_names_the_place(ranks, cache) -> None:
    first, last = ranks(2, _ends, cache, *PP2, "--pipeline-model-parallel-layout", "7|1")
    place = "rank 0, pipeline stage 0, action 0SEND_F2, micro-batch 2"
    assert first.startswith(f"{place}: ValueError: ") and "holds=" in first and last == first
