"""Both libraries' models of one configuration are the same model."""

from __future__ import annotations

import pytest
import torch

from megasnn.layers import BuildContext
from megasnn.models.building import describe
from megasnn.models.spikformer.spikingjelly_names import from_spikingjelly
from megasnn.models.vgg_dvs.dimensions import VggDvs
from megasnn.models.vgg_dvs.spikingjelly_names import vgg_from_spikingjelly
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline.chunk import describe_tensors
from tools.benchmark.layouts_flags import LayoutBenchmark
from tools.benchmark.models import spikingjelly_model, tiny
from tools.benchmark.training_steps import SpikingJellyStep, megasnn_step


@pytest.mark.parametrize("name, parameters", [("spikformer_cifar10", 9_310_906), ("cifar10_dvs_vgg", 9_271_498)])
def test_tensors_correspond(name: str, parameters: int) -> None:
    model = LayoutBenchmark(model=name).dimensions()  # type: ignore[arg-type]
    theirs = spikingjelly_model(model).state_dict()
    if isinstance(model, VggDvs):
        expected = vgg_from_spikingjelly(theirs, [block.pool for block in model.blocks])
    else:
        expected = from_spikingjelly(theirs, model.depth)
    ours = describe_tensors(describe(model), BuildContext())
    assert {e.name: e.shard.global_shape for e in ours} == {n: tuple(t.shape) for n, t in expected.items()}
    assert sum(torch.Size(e.shard.global_shape).numel() for e in ours if e.is_parameter) == parameters


@pytest.mark.usefixtures("products_of_before")
@pytest.mark.parametrize("name", ["spikformer_ti", "cifar10_dvs_vgg"])
def test_a_step_of_each_library(name: str) -> None:
    model = tiny(LayoutBenchmark(model=name, time_steps=2).dimensions())  # type: ignore[arg-type]
    state = initialize_model_parallel(device=torch.device("cpu"))
    try:
        works = (
            SpikingJellyStep(model, 4, "fp32", state.device),
            megasnn_step(model, 4, 2, "fp32", "auto"),
        )
        for work in works:
            loss = work.forward_backward()
            work.update()
            assert 1 < loss < 6 and work.forward_backward() != loss
    finally:
        destroy_model_parallel()
