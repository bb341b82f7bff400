"""On a device the weights are updated before the host has read what the step came to: a step that must change nothing
changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor

from megasnn import device_checks
from megasnn.config import OptimizerConfig
from megasnn.data import GlobalBatch
from megasnn.device_checks import refuse
from megasnn.engine import Engine
from megasnn.engine.distributed_model import DistributedModel
from megasnn.layers import ConvNormNeuron, ParallelConv
from megasnn.models.layer import Layer, layer
from megasnn.optim import build_optimizer, takes_found_inf
from megasnn.parallel.sharding import Shard, ShardedTensor
from megasnn.pipeline.executor import PipelineError
from tests.models.networks import CLASSES, between

FLAGS = {"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 9, "clip_grad": 0.01, "ema_decay": 0.9}
LAYOUTS = {
    "one": (1, {}),
    "stages": (2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "1f1b"}),
    "replicas": (2, {"use_distributed_optimizer": True}),
}


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


def _state(engine: Engine) -> dict[str, Tensor]:
    """Weights, buffers, their average, and the optimizer's state, as they are on this rank."""
    found = {entry.name: entry.tensor for entry in engine.distributed.tensors}
    assert engine.steps.average is not None
    found |= {entry.name: entry.tensor for entry in engine.steps.average.tensors}
    for number, state in enumerate(engine.steps.optimizer.state.values()):
        found |= {f"{number} {name}": value for name, value in state.items()}
    return {name: value.detach().clone() for name, value in found.items()}


def _differences(state: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert state.keys() == other.keys()
    return [name for name in state if not torch.equal(state[name], other[name])]


def _batch(engine: Engine, number: int = 0) -> GlobalBatch:
    images = torch.rand(4, *engine.config.model.input_shape, generator=torch.Generator().manual_seed(0))
    return engine.batches.share(images, torch.arange(4) % CLASSES, 4, 4 * number)


def _trained(flags: dict, runs_ahead: bool) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Losses and norms of three steps, the state behind them, and in which order weights were changed and sums read."""
    order: list[str] = []
    with (
        mock.patch.object(device_checks, "runs_ahead", lambda device: runs_ahead),
        Engine(between(_layers), **FLAGS, **flags) as engine,
        _noting("read", order, DistributedModel, "finish_step"),
        _noting("change", order, type(engine.steps.optimizer), "step"),
    ):
        results = [engine.train_on(_batch(engine, number)) for number in range(3)]
        return [value for each in results for value in (each.loss, each.grad_norm)], _state(engine), order


def _compared(flags: dict) -> tuple:
    (told, state, order), (unread_told, unread_state, unread_order) = (
        _trained(flags, ahead) for ahead in (False, True)
    )
    return _differences(state, unread_state), told == unread_told, order, unread_order


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_that_are_changed_before_the_sums_are_read_have_the_same_bits(ranks, layout: str) -> None:
    count, flags = LAYOUTS[layout]
    for different, same, order, unread_order in ranks(count, _compared, flags):
        assert different == [] and same
        assert order == ["read", "change"] * 3 and unread_order == ["change", "read"] * 3


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


def test_a_finding_ends_the_step_before_anything_is_changed(ahead: Engine) -> None:
    batch, original = _batch(ahead), DistributedModel._run_step
    ahead.train_on(batch)
    before = _state(ahead)

    def finding(self: DistributedModel, micro_batches: object) -> Tensor:
        loss = original(self, micro_batches)
        refuse(torch.ones(1), "a finding")
        return loss

    with mock.patch.object(DistributedModel, "_run_step", finding), pytest.raises(PipelineError, match="a finding"):
        ahead.train_on(batch)
    assert _differences(before, _state(ahead)) == []
