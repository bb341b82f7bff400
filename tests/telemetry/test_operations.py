"""Synaptic operations of an evaluation: equal to NeuroBench's, on every layout."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megasnn import ConvNormNeuron, Engine, layer
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
        return operations.of_sample(record.samples)


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
    """Of 11 samples replicas have different numbers of micro-batches; those that share weights are kept in step."""
    net, x = network(CASES[name])
    values = CASES[name].ours(net.state_dict())
    expected = counted(name, values, x)
    for found in ranks(2, partial(counted, name, values, x, **LAYOUTS[layout])):
        assert [each.name for each in found] == [each.name for each in expected]
        for mine, one in zip(found, expected, strict=True):
            assert mine[1:] == pytest.approx(one[1:], rel=1e-9)


