"""On a device the weights are updated before the host has read what the step came to: a void step changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import Tensor

from megasnn import device_checks
from megasnn.config import OptimizerConfig
from megasnn.data import GlobalBatch
from megasnn.device_checks import explained, refuse
from megasnn.engine import Engine
from megasnn.engine.distributed_model import DistributedModel, StepSums
from megasnn.layers import ConvNormNeuron, ParallelConv
from megasnn.models.layer import Layer, layer
from megasnn.optim import build_optimizer, takes_found_inf
from megasnn.pipeline.executor import PipelineError
from megasnn.sharded_tensors import ShardedTensor
from megasnn.sharding import Shard
from megasnn.telemetry.records import StepResult
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
    """Has a gradient that is not finite, in the third forward."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        y = super().forward(x)
        if self.calls == 3 and y.requires_grad:  # the first of the second step: each has two micro-batches
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
        batch, Wild.calls = _batch(engine), 0
        assert not engine.train_on(batch).skipped
        before = _state(engine)
        result = engine.train_on(batch)
        assert result.skipped and _differences(before, _state(engine)) == []
        # Clipping by such a norm would have spoilt the gradients of `behind`, which come first.
        assert result.not_finite is not None and "first in the gradient of wild.weight" in result.not_finite


@pytest.fixture
def ahead() -> Iterator[Engine]:
    """Of one rank, on a device that the host runs ahead of."""
    with (
        mock.patch.object(device_checks, "runs_ahead", lambda device: True),
        Engine(between(_layers), **FLAGS) as engine,
    ):
        yield engine


def _batch(engine: Engine) -> GlobalBatch:
    images = torch.rand(4, *engine.config.model.input_shape, generator=torch.Generator().manual_seed(0))
    return engine.batches.share(images, torch.arange(4) % CLASSES, 4, 0)


@contextmanager
def _raising(error: BaseException) -> Iterator[None]:
    """The next reading of what a step came to ends in an error."""
    original, errors = DistributedModel._read, [error]

    def read(self: DistributedModel, sums: StepSums) -> tuple[float, float]:
        if errors:
            raise errors.pop()
        return original(self, sums)

    with mock.patch.object(DistributedModel, "_read", read):
        yield


def test_a_step_that_is_interrupted_while_it_is_waited_for_is_finished(ahead: Engine) -> None:
    batch = _batch(ahead)
    with _raising(KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        ahead.train_on(batch)
    ahead.train_on(batch)
    with Engine(between(_layers), **FLAGS) as other:
        for _ in range(2):
            other.train_on(batch)
        assert _differences(_state(ahead), _state(other)) == [] and ahead.iteration == other.iteration == 2


def _interrupted(ahead: bool) -> tuple[int, int]:
    """How many steps were done, and how often a step was read, when its reading was interrupted."""
    order: list[str] = []
    with (
        mock.patch.object(device_checks, "runs_ahead", lambda device: ahead),
        Engine(between(_layers), **FLAGS) as engine,
        _noting("finish", order, DistributedModel, "finish_step"),
        _raising(KeyboardInterrupt()),
        pytest.raises(KeyboardInterrupt),
    ):
        before = _state(engine)
        engine.train_on(_batch(engine))
    assert ahead or _differences(before, _state(engine)) == []
    return engine.iteration, len(order)


def test_only_a_process_by_itself_whose_weights_have_changed_finishes_the_step(ranks) -> None:
    """Other ranks may not come to what is left of it."""
    assert ranks(1, _interrupted, True) == [(1, 2)]
    assert ranks(1, _interrupted, False) == [(0, 1)]
    assert ranks(2, _interrupted, True) == [(0, 1)] * 2


def test_after_an_error_while_a_step_is_waited_for_there_are_no_weights(ahead: Engine) -> None:
    """They may be those of a step that nobody has counted."""
    with _raising(RuntimeError("the device is gone")), pytest.raises(RuntimeError, match="is gone"):
        ahead.train_on(_batch(ahead))
    with pytest.raises(RuntimeError, match=r"after an error \(RuntimeError: the device is gone\): make another one$"):
        ahead.state_dict()


def test_a_loss_alone_that_is_not_finite_changes_nothing(ahead: Engine) -> None:
    batch, original = _batch(ahead), DistributedModel._run_step
    ahead.train_on(batch)
    before = _state(ahead)
    with mock.patch.object(DistributedModel, "_run_step", lambda self, given: original(self, given) + torch.inf):
        result = ahead.train_on(batch)
    assert result.skipped and math.isfinite(result.grad_norm)
    assert _differences(before, _state(ahead)) == []


@pytest.mark.parametrize(
    ("name", "fused", "takes"), [("adamw", True, True), ("adamw", False, False), ("sgd", None, False)]
)
def test_only_fused_steps_are_told_by_the_device(name: str, fused: bool | None, takes: bool) -> None:
    config = OptimizerConfig(optimizer=name)
    entry = ShardedTensor("weight", torch.nn.Parameter(torch.ones(2)), Shard((2,)), is_parameter=True)
    optimizer = build_optimizer([entry], config)
    for group in optimizer.param_groups:
        group["fused"] = fused
    assert takes_found_inf(optimizer, config) == takes


def test_after_a_finding_the_weights_can_still_be_had() -> None:
    with (
        mock.patch.object(device_checks, "runs_ahead", lambda device: True),
        _finding({1}, WRONG, on_rank=0),
        Engine(between(_layers), **FLAGS) as engine,
    ):
        batch = _batch(engine)
        engine.train_on(batch)
        before = engine.state_dict()
        with pytest.raises(PipelineError, match="planted: a finding"):
            engine.train_on(batch)
        assert _differences(before, engine.state_dict()) == []
