"""A training step: what it reads, what it leaves as it is, and what it reports."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import megasnn
from megasnn.common import checks
from megasnn.config import OptimizerConfig
from megasnn.data import RankBatch
from megasnn.engine import Engine
from megasnn.engine.batch import CheckedBatch
from megasnn.engine.model import DistributedModel
from megasnn.kernels import spike_codec as codec
from megasnn.kernels.numba.spike_sums import Work
from megasnn.layers import ConvNormNeuron, ParallelBatchNorm, ParallelConv, SpikingNeuron
from megasnn.layers.layer import Layer, layer
from megasnn.layers.neuron import State
from megasnn.models.model import Model
from megasnn.models.spikformer.model import Spikformer
from megasnn.optim.build import build_optimizer, takes_found_inf
from megasnn.parallel.sharding import Shard, ShardedTensor
from megasnn.pipeline.executor import PipelineExecutor
from megasnn.schedule import Kind
from megasnn.telemetry.timers import Timers
from tests.gpu_waits import copies_of_a_replayed_step, copies_of_a_step, found_in_steps, pageable_copies
from tests.models.networks import CLASSES, Tied, between
from tests.sums import worth_by_time

FLAGS = {"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 9, "clip_grad": 0.01, "ema_decay": 0.9}
PIPELINE = "--pipeline-model-parallel-size 2 --pipeline-schedule"
STAGES = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv"}
FIXED = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "1f1b", "pipeline_model_parallel_layout": "2|2"}


def batch_of(engine: Engine, number: int = 0) -> RankBatch:
    images = torch.rand(4, *engine.config.model.input_shape, generator=torch.Generator().manual_seed(0))
    whole = CheckedBatch({"images": images}, torch.arange(4) % CLASSES, 4)
    return engine.batches.rank_batch(whole, 4 * number)


def tensors_of(engine: Engine) -> dict[str, Tensor]:
    """Weights, buffers, their average, and the optimizer's state, as they are on this rank."""
    found = {entry.name: entry.tensor for entry in engine.distributed.tensors}
    assert engine.trainer.average is not None
    found |= {entry.name: entry.tensor for entry in engine.trainer.average.tensors}
    for number, state in enumerate(engine.optimizer.state.values()):
        found |= {f"{number} {name}": value for name, value in state.items()}
    return {name: value.detach().clone() for name, value in found.items()}


def differences(state: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert state.keys() == other.keys()
    return [name for name in state if not torch.equal(state[name], other[name])]


def layers() -> Iterable[Layer]:
    yield layer("first", ConvNormNeuron(4, 4))
    yield layer("second", ConvNormNeuron(4, 4))


def test_actions_are_timed_by_kind_where_asked() -> None:
    actions = Timers(torch.device("cpu"))
    with Engine(between(layers), **FLAGS, recompute="always") as engine:
        executor = engine.distributed.executor
        batch = batch_of(engine)
        with executor.timed_by(actions):
            engine.train_on(batch)
        counts = {name: len(times) for name, times in actions.ended_ms().items()}
        kinds = Counter(action.kind for action in engine.plan.schedules.training(2).actions[0])
        expected = {"forward": Kind.FORWARD, "recompute": Kind.RECOMPUTE, "backward": Kind.BACKWARD}
        expected["transfers"] = Kind.REDUCE_GRAD
        assert counts == {name: kinds[kind] for name, kind in expected.items()} and counts["recompute"] > 0
        engine.train_on(batch)
        assert actions.ended_ms() == {}


# --- the host waits once


@pytest.mark.parametrize(
    ("model", "count", "flags", "fewer"),
    [
        ("vgg_dvs", 1, "--loss mse --optimizer lamb --bptt-steps 1", 7),
        ("spikformer", 2, f"{PIPELINE} zbv", 7),
        ("vgg_dvs", 2, "--tensor-model-parallel-size 2", 7),
        ("vgg_dvs", 2, "--use-distributed-optimizer", 7),
        ("spikformer", 2, "--context-parallel-size 2", 6),  # each has a sample of every micro-batch
        ("vgg_dvs", 2, "--context-parallel-size 2 --context-parallel-cut rows", 7),
        ("vgg_dvs", 2, "--weight-parallel-size 2 --weight-gradients scattered", 4),
    ],
)
def test_a_step_is_read_once_and_copies_from_pinned_memory(ranks, model, count, flags, fewer) -> None:
    """The first one, too: no rank is told by another what a boundary carries."""
    for found in ranks(count, found_in_steps, model, flags, fewer):
        assert found.first == found.second == found.smaller == ["megasnn/engine/step_sums.py, read: tolist"]
        reads = "model.py, evaluate: tolist", "evaluation.py, read: tolist"
        assert found.evaluation == [f"megasnn/engine/{each}" for each in reads]
        assert found.log == ["megasnn/telemetry/spikes.py, reduce: tolist"]
        assert found.copies == []


def test_a_step_of_one_rank_passes_fewer_than_200_functions() -> None:
    """Named ones of the package: comprehensions are functions up to Python 3.11 only."""
    model, called = Spikformer(embed_dim=32, depth=1, num_heads=2, patch_size=4, image_size=16), set[CodeType]()
    batch = torch.rand(8, *model.input_shape), torch.arange(8) % model.num_classes

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            called.add(frame.f_code)

    flags = {"micro_batch_size": 4, "global_batch_size": 8, "train_iters": 2}
    with mock.patch.object(Work, "is_worth", worth_by_time), Engine(model, **flags) as engine:
        engine.train_step(*batch)
        sys.setprofile(note)
        try:
            engine.train_step(*batch)
        finally:
            sys.setprofile(None)
    folder = str(Path(megasnn.__file__).parent)
    ours = [each for each in called if each.co_filename.startswith(folder) and not each.co_name.startswith("<")]
    assert 100 < len(ours) < 200


def test_mixed_samples_and_graphs_copy_from_pinned_memory(ranks) -> None:
    flags = "--mixup-alpha 0.4 --cutmix-alpha 1 --label-smoothing 0.1 --recompute always"
    assert ranks(1, copies_of_a_step, "spikformer", flags) == [[]]
    assert ranks(1, copies_of_a_replayed_step, "vgg_dvs") == [[]]


def test_pageable_copies_are_seen() -> None:
    """The detector itself, which finds none in steps."""
    x, host = torch.arange(4.0), torch.arange(4.0)
    pageable = [
        *(lambda: host.to(x.device), lambda: (host * 2)[1:].to(x.device), lambda: x.copy_(host), lambda: x + host),
        *(lambda: torch.from_numpy(host.numpy()).to(x.device), lambda: x + torch.arange(4)),
    ]
    for number, work in enumerate(pageable):
        with pageable_copies([host]) as found:
            work()
        assert len(found) == 1, number


# --- a GPU updates before the host has read


@contextmanager
def noting(name: str, order: list[str], owner: type, method: str) -> Iterator[None]:
    original: Callable[..., object] = getattr(owner, method)

    def noted(self: object, *args: object, **kwargs: object) -> object:
        order.append(name)
        return original(self, *args, **kwargs)

    with mock.patch.object(owner, method, noted):
        yield


def ahead(runs_ahead: bool = True) -> Any:
    return mock.patch.object(checks, "runs_ahead", lambda device: runs_ahead)


def trained(flags: dict[str, Any], runs_ahead: bool) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Losses and norms of three steps, the state behind them, and in which order weights were changed and sums read."""
    order: list[str] = []
    with (
        ahead(runs_ahead),
        Engine(between(layers), **FLAGS, **flags) as engine,
        noting("read", order, DistributedModel, "read"),
        noting("change", order, type(engine.optimizer), "step"),
    ):
        results = [engine.train_on(batch_of(engine, number)) for number in range(3)]
        return [value for each in results for value in (each.loss, each.grad_norm)], tensors_of(engine), order


def compared(flags: dict[str, Any]) -> tuple[list[str], bool, list[str], list[str]]:
    (told, state, order), (other_told, other, other_order) = (trained(flags, each) for each in (False, True))
    return differences(state, other), told == other_told, order, other_order


@pytest.mark.parametrize(
    ("count", "flags"),
    [
        (1, {}),
        (2, FIXED),  # costs that are measured would cut it otherwise for the other engine
        (2, {"use_distributed_optimizer": True}),
    ],
)
def test_weights_changed_before_the_sums_are_read_have_the_same_bits(ranks, count: int, flags: dict[str, Any]) -> None:
    for different, same, order, unread_order in ranks(count, compared, flags):
        assert different == [] and same
        assert order == ["read", "change"] * 3 and unread_order == ["change", "read"] * 3


@pytest.mark.parametrize(
    ("name", "fused", "takes"), [("adamw", True, True), ("adamw", False, False), ("sgd", None, False)]
)
def test_only_fused_steps_obey_the_device(name: str, fused: bool | None, takes: bool) -> None:
    config = OptimizerConfig(optimizer=name)
    entry = ShardedTensor("weight", torch.nn.Parameter(torch.ones(2)), Shard((2,)), is_parameter=True)
    optimizer = build_optimizer([entry], config)
    for group in optimizer.param_groups:
        group["fused"] = fused
    assert takes_found_inf(optimizer, config) == takes


# --- steps that change nothing


class Wild(ParallelConv):
    """Has a gradient that is not finite while that is asked for."""

    is_asked = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.is_asked and y.requires_grad:
            y.register_hook(lambda gradient: gradient / 0.0)
        return y


def wild() -> Iterable[Layer]:
    yield layer("before", ConvNormNeuron(4, 4))
    yield layer("wild", Wild(4, 4, 1))
    yield layer("behind", ConvNormNeuron(4, 4))


def wild_step(runs_ahead: bool, flags: dict[str, Any]) -> tuple[list[bool], str, list[str]]:
    """Which of three steps are skipped, what the second one says, where the last rank is wild, and what it changes."""
    with ahead(runs_ahead), Engine(between(wild), **FLAGS, **flags) as engine:
        batch, state = batch_of(engine), engine.distributed.state
        first, before = engine.train_on(batch), tensors_of(engine)
        with mock.patch.object(Wild, "is_asked", state.rank == state.dp.size - 1):
            second, after = engine.train_on(batch), tensors_of(engine)
        skipped = [each.skipped for each in (first, second, engine.train_on(batch))]
        return skipped, str(second.not_finite), differences(before, after)


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize(("count", "flags"), [(1, {}), (2, {"use_distributed_optimizer": True})])
def test_a_step_that_is_not_finite_changes_nothing_and_says_where(ranks, runs_ahead, count, flags) -> None:
    """Clipping by such a norm would have spoilt the gradients of `behind`, which come first."""
    for skipped, not_finite, different in ranks(count, wild_step, runs_ahead, flags):
        assert skipped == [False, True, False] and different == [] and "gradient of wild.weight" in not_finite


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_neither_does_one_whose_loss_alone_is_not_finite(runs_ahead: bool) -> None:
    run = PipelineExecutor.run
    with ahead(runs_ahead), Engine(between(layers), **FLAGS) as engine:
        engine.train_on(batch_of(engine))
        before = tensors_of(engine)
        with mock.patch.object(PipelineExecutor, "run", lambda *args: run(*args) + torch.inf):
            result = engine.train_on(batch_of(engine))
        assert result.skipped and math.isfinite(result.grad_norm) and differences(before, tensors_of(engine)) == []


def test_neither_does_one_whose_statistics_the_running_ones_cannot_hold() -> None:
    """A variance of 2e38 is finite, and its unbiased one is not: the norm divides it away, before any loss sees it."""
    with Engine(between(layers), **FLAGS) as engine:
        engine.train_on(batch_of(engine))
        before = tensors_of(engine)
        norm = next(each for each in engine.distributed.norms if each.running_var is not None)
        record = norm.record

        def large(mean: Tensor, variance: Tensor, count: int) -> None:
            record(mean, torch.full_like(variance, 2e38), count)

        with mock.patch.object(norm, "record", large):
            result = engine.train_on(batch_of(engine))
        assert result.skipped and math.isfinite(result.loss) and math.isfinite(result.grad_norm)
        assert differences(before, tensors_of(engine)) == [] and norm.running_var.isfinite().all()


@pytest.mark.parametrize("backend", ["torch", "fused"])
def test_a_nan_in_an_image_is_named_though_pooling_and_neurons_hide_it(backend: str) -> None:
    model = between(lambda: [layer("unit", ConvNormNeuron(4, 4, kernel_size=3, max_pool=True))], image_size=8)
    x, y = torch.rand(4, 3, 8, 8), torch.arange(4) % CLASSES
    x[3, 0, 2, 5] = torch.nan
    with Engine(model, **FLAGS, neuron_backend=backend) as engine:
        before = engine.state_dict()
        result = engine.train_step(x, y)
        assert result.not_finite and "forward, first in stem.conv" in result.not_finite
        assert not differences(before, engine.state_dict())
        for call in (lambda: engine.evaluate(x, y), lambda: engine.predict(x)):
            with pytest.raises(ValueError, match="nan or infinite"):
                call()
        assert engine.evaluate(torch.rand(4, 3, 8, 8), y).samples == 4


# --- findings of checks


class Half(SpikingNeuron):
    """Gives 0 and 0.5, and does not say so."""

    def charge(self, x: Tensor, state: State) -> Tensor:
        return state["v"] + x

    def fire(self, h: Tensor, state: State) -> Tensor:
        return 0.5 * self.spike(h)

    def reset(self, h: Tensor, spikes: Tensor, state: State) -> State:
        return {"v": h - spikes}


def with_halves() -> Iterable[Layer]:
    yield layer("halves", ConvNormNeuron(4, 4, neuron=Half(4)))
    yield layer("behind", ConvNormNeuron(4, 4))


WRONG: dict[str, tuple[Callable[[], Iterable[Layer]], str, str]] = {
    "labels": (lambda: [layer("unit", ConvNormNeuron(4, 4))], f"--num-classes {CLASSES}", "2|1"),
    "spikes": (with_halves, "pack_bits takes 0 and 1", "2|2"),
}


def wrong_step(what: str, runs_ahead: bool, stages: int) -> tuple[str, str, list[str]]:
    """What a step says, what the next one says, and what differs after it."""
    make, _, layout = WRONG[what]
    flags: dict[str, Any] = {**FLAGS, "pipeline_model_parallel_size": stages}
    if stages > 1:
        flags |= {"pipeline_schedule": "gpipe", "pipeline_model_parallel_layout": layout}
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(between(make), **flags))
        before = tensors_of(engine)
        batch = batch_of(engine)
        if what == "labels" and batch.micro_batches[1].targets is not None:
            batch.micro_batches[1].targets[1] = 77
        stack.enter_context(ahead(runs_ahead))
        if runs_ahead:
            stack.enter_context(mock.patch.object(codec, "_by_numpy", return_value=False))
        with pytest.raises(ValueError) as raised:
            engine.train_on(batch)
        with pytest.raises(RuntimeError) as refused:
            engine.train_on(batch)
        after = tensors_of(engine)
        text = f"{checks.context_of_error(raised.value)}: {raised.value}"
        return text, str(refused.value), [n for n in before if not torch.equal(before[n], after[n])]


@pytest.mark.parametrize(
    ("what", "stages", "runs_ahead"),
    [("labels", 1, True), ("labels", 2, False), ("spikes", 1, False), ("spikes", 2, True)],
)
def test_a_finding_ends_all_ranks_with_its_place_and_changes_nothing(ranks, what, stages, runs_ahead) -> None:
    everyone = ranks(stages, wrong_step, what, runs_ahead, stages)
    text, refused, changed = everyone[0]
    assert all(each == everyone[0] for each in everyone) and changed == []
    context = "action 0SEND_F0, micro-batch 0"  # halves do not fit the boundary
    if what == "labels":
        context = f"pipeline stage {stages - 1}, action {stages - 1}F1, micro-batch 1"
    elif stages == 1:
        context = "action 0F0, micro-batch 0"
    assert f"{context}: " in text and WRONG[what][1] in text and context in refused


def test_findings_outside_of_a_step_raise_at_once_and_inside_are_kept_for_one_step() -> None:
    with pytest.raises(ValueError, match="in words: complaint, seen"), checks.explained("in words: {}".format):
        checks.check_value(torch.tensor(True), "complaint", lambda: "seen")
    collected = checks.DeviceChecks(torch.device("cpu"))
    with collected.collecting():
        checks.check_value(True, "complaint")
    assert collected.count().item() == 1 and [each.text for each in collected.findings()] == ["complaint"]
    with collected.collecting():
        checks.check_value(False, "complaint")
    assert collected.count().item() == 0


def test_a_finding_keeps_the_words_and_the_context_of_its_time() -> None:
    """It is described at the step's end, when other layers and actions have been at work."""
    collected, words = checks.DeviceChecks(torch.device("cpu")), checks.explained("first: {}".format)
    runs_ahead = mock.patch.object(checks, "runs_ahead", lambda device: True)
    with runs_ahead, collected.collecting(), checks.error_context("0F0") as context, words:
        checks.check_value(torch.tensor(True), "complaint")
        words.words, context.describe = "second: {}".format, lambda: "0B0"
    assert [(each.text, each.context) for each in collected.findings()] == [("first: complaint", "0F0")]


# --- weights that are used in odd ways


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


def frozen() -> Model:
    return between(lambda: [layer("left", Left().requires_grad_(False)), layer("next", frozen_weight())])


def frozen_weight() -> nn.Module:
    unit = ConvNormNeuron(4, 4)
    unit.conv.weight.requires_grad_(False)
    return unit


class Scaled(nn.Module):
    """Scales by the mean of a convolution's weight. Its gradient comes with the first part of a backward, where that of
    its layer would come with the second."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = ParallelConv(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.conv.weight.mean())


def scaled() -> Model:
    return between(lambda: [layer("scaled", Scaled()), layer("next", ConvNormNeuron(4, 4))])


def step() -> Model:
    return between(lambda: [layer("step", Step()), layer("next", ConvNormNeuron(4, 4))])


SCATTERED = {"weight_parallel_size": 2, "weight_gradients": "scattered"}


def steps_of(make: Callable[[], Model], flags: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of two steps, and the weights behind them."""
    sizes = {"micro_batch_size": 2, "global_batch_size": 8, "train_iters": 2, "precision": "fp64", "lr": 1e-2}
    with Engine(make(), **sizes, **flags) as engine:
        images = torch.rand(8, *engine.config.model.input_shape, generator=torch.Generator().manual_seed(0))
        losses = [engine.train_step(images, torch.arange(8) % CLASSES).loss for _ in range(2)]
        return losses, engine.state_dict()


@pytest.mark.parametrize(
    ("make", "count", "flags"),
    [
        (left, 2, SCATTERED),
        (frozen, 2, {"tensor_model_parallel_size": 2, "use_distributed_optimizer": True}),
        (step, 2, STAGES),
        (step, 2, {"recompute": "always", "use_distributed_optimizer": True}),
        (Tied, 2, SCATTERED),
        (scaled, 4, {**SCATTERED, "pipeline_model_parallel_size": 2, "pipeline_schedule": "zb1p"}),
    ],
)
def test_any_layout_trains_a_model_whose_weights_are_used_in_odd_ways(ranks, make, count: int, flags) -> None:
    """Layers that are left out, frozen, behind which nothing learns, tied, or whose weight another module uses."""
    losses, weights = steps_of(make, {})
    for found, theirs in ranks(count, steps_of, make, flags):
        assert found == pytest.approx(losses, rel=1e-9)
        for name, value in weights.items():
            torch.testing.assert_close(theirs[name], value, rtol=1e-9, atol=1e-12, msg=name)
