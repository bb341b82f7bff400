"""A boundary between stages that holds what its format cannot: the step is done again, and gives the bits of one rank.

The model's description is made to say of every output that it holds spikes. Some hold counts, or values of dropout: on
one rank nobody asks, between stages they do not fit.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest
import torch

from megasnn.comm.codec import Content
from megasnn.engine.distributed_model import DistributedModel
from megasnn.layers import BuildContext, ConvNormNeuron, ParallelDropout
from megasnn.layers.unit import Residual
from megasnn.models.building import describe
from megasnn.models.description import ModelDescription
from megasnn.models.layer import Layer, layer
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline.executor import PipelineError
from megasnn.pipeline.p2p import WireOptions
from megasnn.pipeline.step_state import MicroBatchInput
from megasnn.schedule import plan_schedule
from megasnn.schedule.partition import balanced_bounds
from megasnn.telemetry.spikes import LayerSpikes
from megasnn.telemetry.timers import Timers
from megasnn.training.watch import Watch
from tests.models.networks import CLASSES, between
from tests.nccl_like import nccl_like
from tests.parity.test_schedules import SCHEDULES, digest

SIZES, UNFIT = (3, 3, 3, 2), {"drop", "first sum", "second sum"}


@dataclass
class Found:
    """What a rank has after an evaluation and a step, tensors as digests, and what was told."""

    loss: float
    norm: float
    correct: float
    evaluated: list[float]
    tensors: dict[str, str]
    layers: list[LayerSpikes]
    went_dense: list[str]
    told: str


def _layers() -> Iterable[Layer]:
    yield layer("drop", ParallelDropout(0.4, "drop"))
    yield layer("behind", ConvNormNeuron(4, 4))
    yield layer("first sum", Residual(ConvNormNeuron(4, 4)))
    yield layer("between", ConvNormNeuron(4, 4))
    yield layer("second sum", Residual(ConvNormNeuron(4, 4)))
    yield layer("last", ConvNormNeuron(4, 4, 3))


def _description(honest: bool) -> ModelDescription:
    model = describe(between(_layers))
    said = [each if honest else replace(each, output=Content.SPIKES) for each in model.layers]
    return replace(model, layers=tuple(said))


def _model(tensor: int, pipeline: int, schedule: str, chunks: int, honest: bool, strict: bool) -> DistributedModel:
    state = initialize_model_parallel(tensor, pipeline)
    described, plan = _description(honest), plan_schedule(schedule, pipeline, chunks)
    context = BuildContext(state.tensor, torch.float32, torch.float32, data=state.data)
    bounds = balanced_bounds([1.0] * len(described.layers), len(plan.placement))
    model = DistributedModel(described, state, context, bounds, plan, wires=WireOptions(strict=strict))
    with torch.no_grad():
        for norm in model.norms:  # more neurons fire, in evaluation too
            assert norm.bias is not None
            norm.bias.fill_(2.5)
    return model


def _inputs(model: DistributedModel) -> list[MicroBatchInput]:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(sum(SIZES), 3, 4, 4, generator=generator).split(SIZES)
    labels = (torch.arange(sum(SIZES)) % CLASSES).split(SIZES)
    data, every = model.state.data, len(SIZES) // model.state.data.size
    return [
        MicroBatchInput(
            images[i] if model.takes_images else None,
            labels[i] if model.gives_logits else None,
            SIZES[i],
            range(sum(SIZES[:i]), sum(SIZES[: i + 1])),
        )
        for i in range(data.rank * every, (data.rank + 1) * every)
    ]


def _run(
    tensor: int, pipeline: int, schedule: str, chunks: int, honest: bool = False, evaluates_first: bool = False
) -> Found:
    with contextlib.redirect_stderr(io.StringIO()) as told:
        model = _model(tensor, pipeline, schedule, chunks, honest, strict=False)
        watch, inputs, evaluated = Watch(model, model.state, Timers(model.state.device)), _inputs(model), list[float]()
        try:
            if evaluates_first:
                evaluated = model.total(model.evaluate(inputs))
            watch.spikes.enabled = True
            loss = model.forward_backward(inputs, sum(SIZES))
            model.merge_statistics(len(SIZES))
            watch.spikes.enabled = False
            measured = watch.since_last(1)
            assert measured.unfit_tensors == len(model.verdict.went_dense)
            evaluated = evaluated or model.total(model.evaluate(inputs))
        finally:
            destroy_model_parallel()
    values = [(e.name, e.tensor if e.tensor.grad is None else e.tensor.grad) for e in model.tensors]
    values += [(f"{e.name} itself", e.tensor) for e in model.tensors]
    return Found(
        loss, model.norm, model.correct, evaluated, digest(values), measured.layers, model.verdict.went_dense,
        told.getvalue(),
    )  # fmt: skip


def _assert_same(found: Found, expected: Found) -> None:
    assert (found.loss, found.norm, found.correct) == (expected.loss, expected.norm, expected.correct)
    assert found.tensors and all(expected.tensors[name] == value for name, value in found.tensors.items())
    assert found.layers == expected.layers, "spikes are counted once"


@pytest.fixture(scope="module")
def alone(ranks) -> dict[bool, Found]:
    return {first: ranks(1, _run, 1, 1, "1f1b", 1, False, first)[0] for first in (False, True)}


@pytest.mark.parametrize("evaluates_first", [False, True], ids=["trains", "evaluates"])
@pytest.mark.parametrize(("schedule", "chunks"), [each for each in SCHEDULES if each[1] < 3])
def test_on_two_stages_it_is_the_step_of_one_rank(ranks, alone, schedule, chunks, evaluates_first) -> None:
    one = alone[evaluates_first]
    assert one.went_dense == [] and "travels dense" not in one.told
    both = ranks(2, _run, 1, 2, schedule, chunks, False, evaluates_first)
    for found in both:
        _assert_same(found, one)
        assert found.evaluated == one.evaluated
        assert found.went_dense == both[0].went_dense


def test_on_four_stages_every_boundary_that_does_not_fit_goes_dense(ranks, alone) -> None:
    everyone = ranks(4, _run, 1, 4, "interleaved", 2)
    for found in everyone:
        _assert_same(found, alone[False])
        assert set(found.went_dense) == {f"the output of {name}" for name in UNFIT}
        assert found.went_dense == everyone[0].went_dense and len(found.went_dense) == 3
    lines = [line for line in everyone[0].told.splitlines() if line.startswith("WARNING: the output of ")]
    assert {line.split(": ")[1] for line in lines} == {
        f"the output of {name} does not fit its format and travels dense from now on" for name in UNFIT
    }
    assert "action 1SEND_F0, micro-batch 0: pack_bits takes 0 and 1, got values from" in lines[0]
    assert len(lines) == 3
    assert not any("travels dense" in found.told for found in everyone[1:])


@pytest.mark.parametrize(("tensor", "world"), [(2, 4), (1, 4), (2, 8)], ids=["tensor", "data", "both"])
def test_beside_tensor_and_data_parallelism_it_is_the_step_of_honest_boundaries(ranks, tensor, world) -> None:
    expected = ranks(world, _run, tensor, 2, "zbv", 2, True)
    for found, honest in zip(ranks(world, _run, tensor, 2, "zbv", 2), expected, strict=True):
        assert found.went_dense and not honest.went_dense
        _assert_same(found, honest)
        assert found.evaluated == honest.evaluated


def _on_nccl_like() -> list[Found]:
    with nccl_like():
        return [_run(1, 2, schedule, chunks) for schedule, chunks in (("1f1b", 1), ("zbv", 2))]


def test_nothing_waits_for_ever_where_nccl_would(ranks, alone) -> None:
    for found in ranks(2, _on_nccl_like):
        for each in found:
            _assert_same(each, alone[False])


def _ends(tensor: int, pipeline: int) -> tuple[str, str]:
    """What an evaluation and a step with strict wires say."""
    model = _model(tensor, pipeline, "1f1b", 1, honest=False, strict=True)
    inputs, told = _inputs(model), []
    try:
        for run in (lambda: model.evaluate(inputs), lambda: model.forward_backward(inputs, sum(SIZES))):
            with pytest.raises(PipelineError) as raised:
                run()
            told.append(str(raised.value))
    finally:
        destroy_model_parallel()
    evaluation, step = told
    return evaluation, step


@pytest.mark.parametrize(("tensor", "pipeline", "world"), [(1, 4, 4), (2, 4, 8), (1, 2, 4)])
def test_strict_wires_end_every_rank_with_the_same_sentence(ranks, tensor, pipeline, world) -> None:
    everyone = ranks(world, _ends, tensor, pipeline)
    assert len(set(everyone)) == 1
    for told in everyone[0]:
        assert ", pipeline stage " in told and "SEND_F0, micro-batch 0: ValueError: pack_bits takes 0 and 1" in told
        assert "(--strict-wire; without it the tensor goes dense)" in told
