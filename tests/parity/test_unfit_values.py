"""A boundary between stages that holds what its format cannot ends every rank with the same sentence.

The model's description is made to say of every output that it holds spikes. Some hold counts, or values of dropout: on
one rank nobody asks, between stages they do not fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from megasnn.device_checks import place_of
from megasnn.engine.model import DistributedModel
from megasnn.kernels.spike_codec import Content
from megasnn.layers import BuildContext, ConvNormNeuron, ParallelDropout
from megasnn.layers.blocks import Residual
from megasnn.models.build import describe
from megasnn.models.layer import Layer, layer
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline.microbatch_state import MicroBatchInput
from megasnn.schedule import plan_schedule
from megasnn.schedule.partition import balanced_bounds
from tests.gradients import evaluated, forward_backward
from tests.models.networks import CLASSES, between
from tests.nccl_like import nccl_like
from tests.parity.ranks import distributed

SIZES, UNFIT = (3, 3, 3, 2), {"drop", "first sum", "second sum"}


def _layers() -> Iterable[Layer]:
    yield layer("drop", ParallelDropout(0.4, "drop"))
    yield layer("behind", ConvNormNeuron(4, 4))
    yield layer("first sum", Residual(ConvNormNeuron(4, 4)))
    yield layer("between", ConvNormNeuron(4, 4))
    yield layer("second sum", Residual(ConvNormNeuron(4, 4)))
    yield layer("last", ConvNormNeuron(4, 4, 3))


def _model(tensor: int, pipeline: int, schedule: str, chunks: int) -> DistributedModel:
    state = initialize_model_parallel(tp=tensor, pp=pipeline)
    described = describe(between(_layers))
    layers = []
    for each in described.layers:
        entries = {key: replace(entry, content=Content.SPIKES) for key, entry in each.entries.items()}
        layers.append(replace(each, entries=entries))
    described = replace(described, layers=tuple(layers))
    plan = plan_schedule(schedule, pipeline, chunks)
    context = BuildContext(state.tp, torch.float32, torch.float32, dp=state.dp)
    bounds = balanced_bounds([1.0] * len(described.layers), len(plan.placement))
    model = distributed(described, state, context, bounds, plan)
    with torch.no_grad():
        for norm in model.norms:  # more neurons fire, in evaluation too
            assert norm.bias is not None
            norm.bias.fill_(2.5)
    return model


def _inputs(model: DistributedModel) -> list[MicroBatchInput]:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(sum(SIZES), 3, 4, 4, generator=generator).split(SIZES)
    labels = (torch.arange(sum(SIZES)) % CLASSES).split(SIZES)
    data, every = model.state.dp, len(SIZES) // model.state.dp.size
    return [
        MicroBatchInput(
            images[i] if model.takes_images else None,
            labels[i] if model.gives_logits else None,
            SIZES[i],
            range(sum(SIZES[:i]), sum(SIZES[: i + 1])),
        )
        for i in range(data.rank * every, (data.rank + 1) * every)
    ]


def _ends(tensor: int, pipeline: int, schedule: str, chunks: int) -> list[str]:
    """The errors of an evaluation and of a step, which leave running statistics and iterations as they were."""
    model = _model(tensor, pipeline, schedule, chunks)
    inputs, told = _inputs(model), []
    before = [entry.tensor.clone() for entry in model.tensors]
    try:
        for run in (lambda: evaluated(model, inputs), lambda: forward_backward(model, inputs, sum(SIZES))):
            with pytest.raises(ValueError) as raised:
                run()
            told.append(f"{place_of(raised.value)}: {raised.value}")
    finally:
        destroy_model_parallel()
    assert all(torch.equal(a, entry.tensor) for a, entry in zip(before, model.tensors, strict=True))
    return told


def _ends_on_nccl_like(*layout: object) -> list[str]:
    with nccl_like():
        return _ends(*layout)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tensor", "pipeline", "world", "schedule", "chunks", "run"),
    [
        (1, 4, 4, "1f1b", 1, _ends),
        (2, 4, 8, "1f1b", 1, _ends),
        (1, 2, 4, "zbv", 2, _ends),
        (1, 2, 2, "zbv", 2, _ends_on_nccl_like),
    ],
    ids=["stages", "tensor", "data", "where-nccl-waits"],
)
def test_every_rank_ends_with_the_same_error(ranks, tensor, pipeline, world, schedule, chunks, run) -> None:
    everyone = ranks(world, run, tensor, pipeline, schedule, chunks)
    assert all(told == everyone[0] for told in everyone)
    for told in everyone[0]:
        assert ", pipeline stage " in told and "SEND_F0, micro-batch 0" in told
        assert any(f"the output of {name}" in told for name in UNFIT) and "mark_spikes" in told
