"""Synaptic operations of an evaluation: equal to NeuroBench's, on every layout."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megasnn import Engine, layer
from megasnn.telemetry.operations import (
    AC_JOULES,
    MAC_JOULES,
    LayerOperations,
    OperationCounter,
    add_ranks,
    describe_operations,
    operation_scalars,
    times_used,
)
from megasnn.training.operations import Operations
from tests.models.networks import between
from tests.telemetry.neurobench_counts import CASES, TABLE, network

SIZES = {"micro_batch_size": 3, "global_batch_size": 6, "train_iters": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "rows": {"context_parallel_size": 2, "context_parallel_cut": "rows"},
    "samples": {"context_parallel_size": 2},
    "data": {},
    "weights": {"weight_parallel_size": 2},
}


def counted(name: str, values: dict[str, Tensor], x: Tensor, **flags: Any) -> list[LayerOperations]:
    """Operations of a sample, of an evaluation on this layout."""
    case = CASES[name]
    with Engine(case.model, **SIZES, precision="fp64", **flags) as engine:
        engine.load_state_dict(values)
        operations = Operations(engine.distributed)
        with operations.counting():
            record = engine.evaluate([(x, torch.zeros(len(x), dtype=torch.long))])
        assert record.samples == len(x)
        return operations.mean_per_sample(record.samples)


@pytest.mark.parametrize("name", CASES)
def test_neurobench_counts_the_same(name: str) -> None:
    """NeuroBench 2.3.0, layer by layer: tests/telemetry/neurobench_counts.py."""
    net, x = network(CASES[name])
    found = counted(name, CASES[name].ours(net.state_dict()), x)
    expected = json.loads(TABLE.read_text())["networks"][name]
    scalars = operation_scalars(found)
    assert scalars["validation/effective_macs"] == pytest.approx(expected["Effective_MACs"], rel=1e-9)
    assert scalars["validation/effective_acs"] == pytest.approx(expected["Effective_ACs"], rel=1e-9)
    for mine, theirs in zip(found, expected["layers"].values(), strict=True):
        assert mine.effective_macs == pytest.approx(theirs.get("Effective_MACs", 0.0), rel=1e-9)
        assert mine.effective_acs == pytest.approx(theirs.get("Effective_ACs", 0.0), rel=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_every_layout_counts_the_same(name: str, layout: str, ranks: Any) -> None:
    """One replica has a micro-batch more of 7 samples; zeros keep replicas that share weights in step."""
    net, x = network(CASES[name])
    x = x[:7]
    values = CASES[name].ours(net.state_dict())
    expected = counted(name, values, x)
    for found in ranks(2, partial(counted, name, values, x, **LAYOUTS[layout])):
        assert [each.name for each in found] == [each.name for each in expected]
        for mine, one in zip(found, expected, strict=True):
            assert mine[1:] == pytest.approx(one[1:], rel=1e-9)


class Plain(nn.Module):
    """Modules of torch's, which are whole on every rank: a strided, dilated, grouped convolution and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, stride=2, padding=(2, 1), dilation=(1, 2), groups=2)
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.flatten(0, 1))
        return self.linear(y.mean((2, 3)))[..., None, None].unflatten(0, x.shape[:2])


PLAIN = between(lambda: [layer("plain", Plain())], image_size=8)


def counts_of_plain(**flags: Any) -> tuple[dict[str, tuple[float, float]], dict[str, Tensor]]:
    """(MACs, ACs) of a sample in each product, and the inputs of torch's modules."""
    x = 10 * torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    inputs: dict[str, list[Tensor]] = {"conv": [], "linear": []}
    with Engine(PLAIN, **SIZES, precision="fp64", **flags) as engine:
        (chunk,) = engine.distributed.chunks.values()
        plain = dict(chunk.named_layers())["plain"]
        for name, seen in inputs.items():
            plain.get_submodule(name).register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0]))
        operations = Operations(engine.distributed)
        with operations.counting():
            engine.evaluate([(x, torch.zeros(5, dtype=torch.long))])
        found = {each.name: each[1:] for each in operations.mean_per_sample(5)}
    return found, {name: torch.cat(seen) for name, seen in inputs.items()}


def test_modules_of_torch_are_counted_once(ranks: Any) -> None:
    """By NeuroBench's rule: an input that is not 0 is 1, and so is every weight."""
    found, inputs = counts_of_plain()
    with torch.no_grad():
        ones = (inputs["conv"] != 0).double()
        conv = torch.conv2d(ones, torch.ones(6, 2, 3, 3).double(), None, 2, (2, 1), (1, 2), 2).sum().item() / 5
    assert 0.02 < ones.mean() < 0.8 and found["plain.conv"] == pytest.approx((0.0, conv), rel=1e-12)
    linear = 4 * torch.count_nonzero(inputs["linear"]).item() / 5
    assert found["plain.linear"] == pytest.approx((linear, 0.0), rel=1e-12)
    for on_two, _ in ranks(2, partial(counts_of_plain, tensor_model_parallel_size=2)):
        assert on_two == found


def test_silent_neurons_need_no_operations() -> None:
    """The first layer of a network that is silent in the evaluation has operations, whatever happened in training."""
    net, x = network(CASES["vgg on event frames"])
    values = CASES["vgg on event frames"].ours(net.state_dict())
    silent = {name: torch.zeros_like(value) if "norm" in name else value for name, value in values.items()}
    first, *others = counted("vgg on event frames", silent, x)
    assert first.effective_macs > 0 and all(each[1:] == (0.0, 0.0) for each in others)


def test_operations_by_hand() -> None:
    """Three samples on two ranks; a value of 2 makes a product one of MACs, on whatever rank it is."""
    across = torch.tensor([[1.0, 2.0], [1.0, 2.0]], dtype=torch.float64)
    counters = OperationCounter(), OperationCounter()
    spikes = torch.tensor([[[1.0, 0.0], [0.0, -1.0]]]).expand(2, 1, 2, 2)
    for counter, x in zip(counters, (spikes, 2 * spikes[:1]), strict=True):
        counter.observe("first", x, lambda space: across, steps=4)
        counter.observe("second", x.abs().clamp(max=1), lambda space: across, are_spikes=True)
    taken = [counter.take() for counter in counters]
    assert taken[0]["first"] == (24.0, True) and taken[1]["first"] == (12.0, False)
    found = add_ranks(taken, samples=3)
    assert found == [LayerOperations("first", 12.0, 0.0), LayerOperations("second", 0.0, 3.0)]
    assert counters[0].take() == {} and operation_scalars([]) == {}
    energy = 1e3 * (12 * MAC_JOULES + 3 * AC_JOULES)
    assert operation_scalars(found)["validation/energy_mj"] == pytest.approx(energy, rel=1e-12)
    assert "3 effective ACs and 12 effective MACs" in describe_operations(found, 1250)
    assert f"1250 MACs, {1e3 * 1250 * MAC_JOULES:.4g} mJ" in describe_operations(found, 1250)


def test_borders_and_strides() -> None:
    """A pixel at the border of a padded convolution goes into fewer outputs; padding is no input."""
    kernel = torch.ones(1, 1, 3, 3, dtype=torch.float64)
    padded = times_used(lambda x: torch.conv2d(x, kernel, padding=1), (3, 3))
    assert padded.tolist() == [[4, 6, 4], [6, 9, 6], [4, 6, 4]]
    strided = times_used(lambda x: torch.conv2d(x, kernel, stride=2), (5, 4))
    assert strided.tolist() == [[1, 1, 1, 0], [1, 1, 1, 0], [2, 2, 2, 0], [1, 1, 1, 0], [1, 1, 1, 0]]
