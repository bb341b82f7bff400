"""Trained parameters that the first step gave no gradient are named, once, on any layout."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megasnn.engine import Engine
from megasnn.engine import step as steps
from megasnn.engine.without_gradient import notice_of
from megasnn.layers import ConvNormNeuron, ParallelBatchNorm, ParallelConv
from megasnn.models.layer import layer
from megasnn.models.model import Model
from tests.models.networks import CLASSES, Tied, between
from tests.training.runs import train

NOTICE = "no gradient in the first step"


class Left(nn.Module):
    """Leaves a convolution and a norm out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = ParallelConv(4, 4, 1), ParallelBatchNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Step(nn.Module):
    """Has no derivative: nothing before it learns."""

    def forward(self, x: Tensor) -> Tensor:
        return (x > 0.5).to(x.dtype)


def left() -> Model:
    return between(lambda: [layer("left", Left()), layer("next", ConvNormNeuron(4, 4))])


def step() -> Model:
    return between(lambda: [layer("step", Step()), layer("next", ConvNormNeuron(4, 4))])


def tied() -> Model:
    return Tied()


MISSING = {
    left: ["left.conv.weight", "left.norm.weight", "left.norm.bias"],
    step: ["stem.conv.weight", "stem.norm.weight", "stem.norm.bias"],
    tied: [],
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {},
    "pipeline": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv"},
    "tensor": {"tensor_model_parallel_size": 2},
    "recompute": {"recompute": "always", "use_distributed_optimizer": True},
    "scattered": {"weight_parallel_size": 2, "weight_gradients": "scattered"},
}


def told(make: Callable[[], Model], flags: dict[str, Any]) -> list[str]:
    """What is told in each of two steps, on this rank."""
    found = []
    with Engine(make(), micro_batch_size=2, global_batch_size=8, train_iters=2, **flags) as engine:
        images = torch.rand(8, *engine.config.model.input_shape, generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                engine.train_step(images, torch.arange(8) % CLASSES)
            found.append("".join(str(each.message) for each in caught if NOTICE in str(each.message)))
    return found


CASES = [
    *((left, layout) for layout in LAYOUTS),
    *((step, layout) for layout in ("replicas", "tensor")),  # layers that are executed apart get zeros
    *((tied, layout) for layout in LAYOUTS if layout != "tensor"),  # its plain modules have all channels
]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_an_engine_warns_once(ranks, model: Any, layout: str) -> None:
    (first, second), (elsewhere, _) = ranks(2, told, model, LAYOUTS[layout])
    assert first == (notice_of(MISSING[model]) if MISSING[model] else "")
    assert second == elsewhere == ""


def losses(flags: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Of three steps, and the weights behind them."""
    with Engine(
        step(), micro_batch_size=2, global_batch_size=8, train_iters=3, precision="fp64", lr=1e-2, **flags
    ) as engine:
        images = torch.rand(8, *engine.config.model.input_shape, generator=torch.Generator().manual_seed(0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [engine.train_step(images, torch.arange(8) % CLASSES).loss for _ in range(3)]
        return found, engine.state_dict()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_without_a_derivative_trains_on_any_layout(ranks, layout: str) -> None:
    expected, weights = losses({})
    for found, theirs in ranks(2, losses, LAYOUTS[layout]):
        assert found == pytest.approx(expected, rel=1e-9)
        for name, value in weights.items():
            torch.testing.assert_close(theirs[name], value, rtol=1e-9, atol=1e-12, msg=name)


def test_frozen_parameters_are_not_meant() -> None:
    assert told(left, {"lr_scale_of": "left=0"}) == ["", ""]


def test_a_run_says_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for names in ([], ["a.weight"]):
        with monkeypatch.context() as patched:
            if names:
                patched.setattr(steps, "names_without_gradient", lambda model: ["a.weight"])
            folder = tmp_path / str(len(names))
            train(str(tmp_path), "--train-iters", "3", "--eval-iters", "0", "--tensorboard-dir", str(folder))
        assert _said(folder) == [notice_of(names)] * len(names)


def _said(folder: Path) -> list[str]:
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line["text"] for line in lines if NOTICE in line.get("text", "")]


def test_not_all_of_many_names_are_listed() -> None:
    text = notice_of([f"layer.{index}" for index in range(20)])
    assert "layer.7 and 12 more. " in text and "layer.8" not in text
