"""On a device the weights are updated before the host has read what the step came to: a void step changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import Tensor

from megasnn import device_checks
from megasnn.device_checks import explained, refuse
from megasnn.engine import Engine
from megasnn.engine.distributed_model import DistributedModel
from megasnn.layers import ConvNormNeuron, ParallelConv
from megasnn.models.layer import Layer, layer
from megasnn.pipeline.executor import PipelineError
from megasnn.telemetry.logline import StepResult
from tests.models.networks import CLASSES, between

FLAGS = {"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 9, "clip_grad": 0.01, "ema_decay": 0.9}
UNFIT, WRONG = "first", None  # a boundary that goes dense, and what nothing helps against
LAYOUTS = {
    "one": (1, {}),
    "stages": (2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "1f1b"}),
    "replicas": (2, {"use_distributed_optimizer": True}),
}


@dataclass
class Course:
    """What a run has told and kept, and in which order a step's weights were changed and its sums read."""

    results: list[StepResult]
    state: dict[str, Tensor]
    order: list[str]


def _layers() -> Iterable[Layer]:
    yield layer("first", ConvNormNeuron(4, 4))
    yield layer("second", ConvNormNeuron(4, 4))


@contextmanager
def _noting(name: str, order: list[str], owner: type, method: str) -> Iterator[None]:
    original: Callable[..., object] = getattr(owner, method)

    def noted(self: object, *args: object, **kwargs: object) -> object:
        order.append(name)
        return original(self, *args, **kwargs)

    with mock.patch.object(owner, method, noted):
        yield


@contextmanager
def _finding(attempts: set[int], boundary: str | None, on_rank: int) -> Iterator[None]:
    """In these attempts, counted from 0, a check on a rank finds something at the end of backward."""
    original, seen = DistributedModel._run_step, [0]

    def run_step(self: DistributedModel, micro_batches: object) -> Tensor:
        loss = original(self, micro_batches)
        if seen[0] in attempts and self.state.rank == on_rank:
            with explained("planted: {}".format, boundary):
                refuse(torch.ones(1), "a finding")
        seen[0] += 1
        return loss

    with mock.patch.object(DistributedModel, "_run_step", run_step):
        yield


def _state(engine: Engine) -> dict[str, Tensor]:
    """Weights, buffers, their average, and the optimizer's state, as they are on this rank."""
    found = {entry.name: entry.tensor for entry in engine.distributed.tensors}
    assert engine.steps.average is not None
    found |= {entry.name: entry.tensor for entry in engine.steps.average.tensors}
    for number, state in enumerate(engine.steps.optimizer.state.values()):
        found |= {f"{number} {name}": value for name, value in state.items()}
    return {name: value.detach().clone() for name, value in found.items()}


def _course(flags: dict, runs_ahead: bool, void_attempts: set[int]) -> Course:
    order: list[str] = []
    with (
        mock.patch.object(device_checks, "runs_ahead", lambda device: runs_ahead),
        _finding(void_attempts, UNFIT, on_rank=0),
        Engine(between(_layers), **FLAGS, **flags) as engine,
        _noting("read", order, DistributedModel, "_read"),
        _noting("change", order, type(engine.steps.optimizer), "step"),
    ):
        shape = engine.config.model.input_shape
        images = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0))
        results = [engine.train_on(engine.batches.share(images, torch.arange(4) % CLASSES, 4, 4 * n)) for n in range(3)]
        return Course(results, _state(engine), order)


def _differences(state: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert state.keys() == other.keys()
    return [name for name in state if not torch.equal(state[name], other[name])]


def _compared(flags: dict) -> tuple[list[str], Course, Course]:
    as_read, unread = _course(flags, False, set()), _course(flags, True, {0, 2})
    return _differences(as_read.state, unread.state), as_read, unread


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_void_step_is_done_again_as_if_it_had_not_been(ranks, layout: str) -> None:
    count, flags = LAYOUTS[layout]
    for different, as_read, unread in ranks(count, _compared, flags):
        assert different == []
        assert [each.loss for each in unread.results] == [each.loss for each in as_read.results]
        assert [each.grad_norm for each in unread.results] == [each.grad_norm for each in as_read.results]
        assert as_read.order == ["read", "change"] * 3
        assert unread.order == ["change", "read"] * 5


class Wild(ParallelConv):
    """Has a gradient that is not finite, in its second forward."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        y = super().forward(x)
        if self.calls == 3 and y.requires_grad:  # each step has two micro-batches
            y.register_hook(lambda gradient: gradient / 0.0)
        return y


def _wild() -> Iterable[Layer]:
    yield layer("before", ConvNormNeuron(4, 4))
    yield layer("wild", Wild(4, 4, 1))
    yield layer("behind", ConvNormNeuron(4, 4))


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_step_that_is_not_finite_changes_nothing_and_says_where(runs_ahead: bool) -> None:
    Wild.calls = 0
    with (
        mock.patch.object(device_checks, "runs_ahead", lambda device: runs_ahead),
        Engine(between(_wild), **FLAGS) as engine,
    ):
        images = torch.rand(4, *engine.config.model.input_shape, generator=torch.Generator().manual_seed(0))
        batch = engine.batches.share(images, torch.arange(4) % CLASSES, 4, 0)
        Wild.calls = 0
        assert not engine.train_on(batch).skipped
        before = _state(engine)
        result = engine.train_on(batch)
        assert result.skipped and _differences(before, _state(engine)) == []
        # Clipping by such a norm would have spoilt the gradients of `behind`, which come first.
        assert result.not_finite is not None and "first in the gradient of wild.weight" in result.not_finite


def test_after_a_finding_the_weights_can_still_be_had() -> None:
    with (
        mock.patch.object(device_checks, "runs_ahead", lambda device: True),
        _finding({1}, WRONG, on_rank=0),
        Engine(between(_layers), **FLAGS) as engine,
    ):
        images = torch.rand(4, *engine.config.model.input_shape, generator=torch.Generator().manual_seed(0))
        batch = engine.batches.share(images, torch.arange(4) % CLASSES, 4, 0)
        engine.train_on(batch)
        before = engine.state_dict()
        with pytest.raises(PipelineError, match="planted: a finding"):
            engine.train_on(batch)
        assert _differences(before, engine.state_dict()) == []
