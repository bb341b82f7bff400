"""What crosses the stages of a run: bits and bytes, counted, checked, and the same function for every wire."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.training.runs import train

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
    assert 0 < sent["7_communication/pp_mb"] <= most * sent["7_communication/pp_mb_if_dense"]
    assert 0 < sent["7_communication/backward_mb"] == sent["7_communication/backward_mb_if_dense"]
