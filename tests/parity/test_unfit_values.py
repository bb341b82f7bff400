"""A boundary between stages that holds what its format cannot ends every rank with the same sentence.

The model's description is made to say of every output that it holds spikes. Some hold counts, or values of dropout: on
one rank nobody asks, between stages they do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch

from megasnn.common.checks import context_of_error
from megasnn.kernels.spike_codec import Content
from megasnn.layers import ConvNormNeuron, ParallelDropout
from megasnn.layers.blocks import Residual
from megasnn.layers.layer import Layer, layer
from megasnn.models.build import describe_model
from megasnn.models.description import ModelDescription
from tests.models.networks import CLASSES, between
from tests.nccl_like import nccl_like
from tests.parity.ranks import Layout, built, evaluated, forward_backward, inputs_of

SAMPLES, UNFIT = 11, {"drop", "first sum", "second sum"}


def _layers() -> Iterable[Layer]:
    yield layer("drop", ParallelDropout(0.4, "drop"))
    yield layer("behind", ConvNormNeuron(4, 4))
    yield layer("first sum", Residual(ConvNormNeuron(4, 4)))
    yield layer("between", ConvNormNeuron(4, 4))
    yield layer("second sum", Residual(ConvNormNeuron(4, 4)))
    yield layer("last", ConvNormNeuron(4, 4, 3))


def _of_spikes_alone() -> ModelDescription:
    described = describe_model(between(_layers))
    layers = []
    for each in described.layers:
        entries = {key: replace(entry, content=Content.SPIKES) for key, entry in each.entries.items()}
        layers.append(replace(each, entries=entries))
    return replace(described, layers=tuple(layers))


def _ends(layout: Layout) -> list[str]:
    """The errors of an evaluation and of a step, which leave running statistics and iterations as they were."""
    with built(_of_spikes_alone(), layout, torch.float32) as model:
        for norm in model.norms:  # more neurons fire, in evaluation too
            torch.nn.init.constant_(norm.bias, 2.5)
        images = torch.rand(SAMPLES, 3, 4, 4, generator=torch.Generator().manual_seed(1))
        inputs, told = inputs_of(model, images, torch.arange(SAMPLES) % CLASSES, 3), []
        before = [entry.tensor.clone() for entry in model.tensors]
        for run in (lambda: evaluated(model, inputs), lambda: forward_backward(model, inputs, SAMPLES)):
            with pytest.raises(ValueError) as raised:
                run()
            told.append(f"{context_of_error(raised.value)}: {raised.value}")
        assert all(torch.equal(a, entry.tensor) for a, entry in zip(before, model.tensors, strict=True))
        return told


def _ends_on_nccl_like(layout: Layout) -> list[str]:
    with nccl_like():
        return _ends(layout)


@pytest.mark.parametrize(
    ("layout", "run"),
    [
        (Layout(pipeline=4), _ends),
        (Layout(1, 2, 4), _ends),
        (Layout(2, 1, 2, "zbv"), _ends),
        (Layout(1, 1, 2, "zbv"), _ends_on_nccl_like),
    ],
    ids=["stages", "tensor", "data", "where-nccl-waits"],
)
def test_every_rank_ends_with_the_same_error(ranks, layout: Layout, run: Callable[[Layout], list[str]]) -> None:
    everyone = ranks(layout.world_size, run, layout)
    assert all(told == everyone[0] for told in everyone)
    for told in everyone[0]:
        assert ", pipeline stage " in told and "SEND_F0, micro-batch 0" in told
        assert any(f"the output of {name}" in told for name in UNFIT) and "mark_spikes" in told
