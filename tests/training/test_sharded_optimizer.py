"""Replicas that each own some rows of every parameter train as those that hold all of its optimizer state."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megasnn.checkpoint.format import read_metadata
from megasnn.config import parse
from megasnn.config.training import Length
from megasnn.engine import Engine
from megasnn.models.model import run_config
from megasnn.models.registry import MODELS
from megasnn.optim.build import held_state_bytes
from megasnn.optimizers import OPTIMIZERS, OptimizerRecipe
from megasnn.parallel.gradient_buckets import GradientBuckets
from megasnn.parallel.traffic import statistics
from tests.training.runs import TINY, close, same, saved, train, without_trial

SHARDED = "--use-distributed-optimizer"
TINY_FLAGS = tuple(TINY)
CLIPPED = ("--train-iters", "3", "--micro-batch-size", "2", "--clip-grad", "0.05", "--eval-iters", "0")


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def rmsprop(groups: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(groups, lr=lr)


OWN = {"own": OptimizerRecipe("element by element", rmsprop, ("step", "square_avg"))}


def trained(cache: str, *flags: str) -> None:
    with mock.patch.dict(OPTIMIZERS, OWN), without_trial():
        train(cache, *CLIPPED, *flags)


@pytest.mark.parametrize(
    ("replicas", "flags"),
    [
        (2, "--neuron plif --ema-decay 0.75 --eval-interval 2 --eval-iters 1"),
        (4, ""),
        pytest.param(4, "--neuron plif", marks=pytest.mark.matrix),
        pytest.param(2, "--optimizer lamb --lr 1e-2 --weight-decay 0.05", marks=pytest.mark.matrix),
        pytest.param(4, "--optimizer lamb --lr 1e-2 --weight-decay 0.05", marks=pytest.mark.matrix),
        pytest.param(4, "--optimizer sgd", marks=pytest.mark.matrix),
        pytest.param(2, "--optimizer own", marks=pytest.mark.matrix),
        pytest.param(2, "--recompute always", marks=pytest.mark.matrix),
        pytest.param(4, "--neuron plif --context-parallel-size 2", marks=pytest.mark.matrix),
        pytest.param(4, "--pipeline-model-parallel-size 2 --pipeline-schedule zbv", marks=pytest.mark.matrix),
    ],
    ids=lambda value: value if isinstance(value, str) else f"of-{value}",
)
def test_it_trains_as_plain_data_parallelism(ranks, cache, tmp_path, replicas, flags) -> None:
    """Weights, their average, and the optimizer's state behind three steps with clipping."""
    for name, more in (("plain", ()), ("sharded", (SHARDED,))):
        ranks(replicas, trained, cache, "--precision", "fp64", *flags.split(), "--save", str(tmp_path / name), *more)
    plain, sharded = saved(tmp_path / "plain"), saved(tmp_path / "sharded")
    assert any(name.startswith("optimizer.") for name in plain) and close(plain, sharded)
    files = [read_metadata(tmp_path / name / "iter_0000003").files for name in ("plain", "sharded")]
    written = [sum(name.endswith(".safetensors") for name in each) for each in files]
    assert written[1] == replicas > written[0], "every rank writes what it owns"


def engine(*flags: str) -> Engine:
    config = parse(run_config(MODELS["spikformer"]), [*TINY_FLAGS, *CLIPPED, *flags])
    return Engine(config, length=Length(3))


def batch(made: Engine) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(10, *made.config.model.input_shape, generator=generator), torch.arange(10) % 10


def accounts() -> tuple[int, int, int, int, int]:
    """Bytes that the second step has received, of all trained parameters, of this rank's state; at most of the state by
    rows; and of all state on one rank."""
    with engine("--neuron", "plif", SHARDED) as made:
        made.train_step(*batch(made))
        statistics.reset()
        with statistics.counting():
            made.train_step(*batch(made))
        received = statistics.total("dp", "all_to_all").bytes
        statistics.reset()
        parameters = [e.tensor for e in made.distributed.tensors if e.is_parameter]
        most = 0
        for parameter in parameters:
            rows = len(parameter) if parameter.ndim else 1
            most += 2 * (parameter.nbytes // made.state.dp.size + parameter.nbytes // rows) + 4
        size = 4 * made.distributed.trained_parameters
        return received, size, held_state_bytes(made.step.optimizer), most, 2 * size + 4 * len(parameters)


@pytest.mark.parametrize("replicas", [3, pytest.param(4, marks=pytest.mark.matrix)])
def test_what_a_step_receives_and_a_rank_holds(ranks, replicas) -> None:
    found = ranks(replicas, accounts)
    assert sum(received for received, *_ in found) == 2 * (replicas - 1) * found[0][1]
    for _, _, held, most, all_state in found:
        assert held <= most < all_state


def spoiled() -> tuple[list[bool], str, bool, bool]:
    """A step with an infinite gradient and one without, against a run with the second alone."""
    with engine(SHARDED) as undisturbed:
        undisturbed.train_step(*batch(undisturbed))
        expected = undisturbed.state_dict()
    with engine(SHARDED) as made:
        before = made.state_dict()
        (weight,) = [e.tensor for e in made.distributed.tensors if e.name == "head.weight"]
        reduce = GradientBuckets._reduce

        def spoiling(self: GradientBuckets, bucket: Any, rows: Any) -> None:
            if weight.grad is not None and any(weight is each for each in bucket.parameters) and made.state.rank == 1:
                weight.grad[0] = float("inf")
            reduce(self, bucket, rows)

        with mock.patch.object(GradientBuckets, "_reduce", spoiling):
            result = made.train_step(*batch(made))
        unchanged = same(made.state_dict(), before) and not held_state_bytes(made.step.optimizer)
        made.step.iteration = made.step.consumed_samples = 0
        made.train_step(*batch(made))
        return [result.skipped], str(result.not_finite), unchanged, same(made.state_dict(), expected)


def test_a_step_that_does_not_count_changes_nothing(ranks) -> None:
    for skipped, where, unchanged, same_end in ranks(2, spoiled):
        assert skipped == [True] and "gradient of head.weight" in where and unchanged and same_end
