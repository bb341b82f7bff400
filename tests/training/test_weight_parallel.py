"""Runs and Engines whose replicas share weights by rows: the same bits, any layout, what is sent and held, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megasnn.checkpoint.folder import list_checkpoints
from megasnn.config import ConfigError, parse, validate
from megasnn.config.training import Length
from megasnn.engine import Engine
from megasnn.layers import ConvNormNeuron, ParallelConv, ParallelLinear
from megasnn.models.layer import layer
from megasnn.models.model import run_config
from megasnn.models.registry import MODELS
from megasnn.parallel.fsdp import GatheredWeights
from megasnn.parallel.traffic import statistics
from megasnn.schedule import Kind
from megasnn.schedule.memory import weights_held
from tests.models.networks import CLASSES, between
from tests.training.runs import TINY, close, saved
from tests.training.test_replicas import WEIGHT, train_with_flip
from tests.training.test_sharded_optimizer import SHARDED, batch, trained

BY_TWO = ("--weight-parallel-size", "2")
BY_FOUR = ("--weight-parallel-size", "4")
SCATTERED = ("--weight-gradients", "scattered")
PP2 = ("--pipeline-model-parallel-size", "2", "--pipeline-schedule", "zbv")
EVEN = ("--micro-batch-size", "2", "--global-batch-size", "8")
THREE = ("--train-iters", "3", "--clip-grad", "0.05", "--eval-iters", "0", *EVEN)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize(
    ("replicas", "flags", "shared"),
    [
        (2, "--neuron plif --ema-decay 0.75 --eval-interval 2 --eval-iters 1", BY_TWO),
        (4, "--optimizer lamb --lr 1e-2 --weight-decay 0.05", (*BY_FOUR, "--recompute", "always")),
        (4, "--optimizer sgd", (*BY_FOUR, SHARDED)),
        pytest.param(4, "--neuron plif", BY_FOUR, marks=pytest.mark.matrix),
        pytest.param(2, "--bptt-steps 1", BY_TWO, marks=pytest.mark.matrix),
        pytest.param(2, "--tensor-model-parallel-size 2", BY_TWO, marks=pytest.mark.matrix),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_it_trains_as_plain_data_parallelism(ranks, cache, tmp_path, replicas, flags, shared) -> None:
    """Weights, their average, and the optimizer's state behind three steps with clipping, where one copy is shared by
    all replicas."""
    world = 2 * replicas if "tensor" in flags else replicas
    for name, more in (("plain", ()), ("shared", shared)):
        ranks(
            world, trained, cache, *EVEN, "--precision", "fp64", *flags.split(), "--save", str(tmp_path / name), *more
        )
    plain, shared_weights = saved(tmp_path / "plain"), saved(tmp_path / "shared")
    assert any(name.startswith("optimizer.") for name in plain)
    assert close(plain, shared_weights)


def test_a_run_goes_on_on_any_layout(ranks, cache, tmp_path) -> None:
    """A step on each layout, from what the one before has saved, ends as all steps on one rank: replicas that own rows
    of the optimizer's state and some that do not, stages, and replicas that share weights."""
    layouts = [
        (4, (SHARDED, "--async-save")),
        (3, ()),
        (2, (SHARDED,)),
        (2, ("--pipeline-model-parallel-size", "2", "--pipeline-schedule", "1f1b")),
        (4, (*BY_TWO, *PP2, "--async-save")),
        (4, (*BY_TWO, SHARDED, *SCATTERED)),
    ]
    common = ("--train-iters", str(len(layouts)), "--precision", "fp64", "--neuron", "plif", "--ema-decay", "0.5")
    common = (*common, "--micro-batch-size", "2", "--global-batch-size", "24")
    straight, run = tmp_path / "straight", tmp_path / "run"
    trained(cache, *common, "--save", str(straight))
    for number, (size, flags) in enumerate(layouts, start=1):
        folders = ("--load", str(run), "--save", str(run))
        ranks(size, trained, cache, *common, *folders, *flags, "--exit-interval", str(number))
    assert list_checkpoints(run) == [1, 2, 3, 4, 5, 6]
    ours, theirs = saved(run), saved(straight)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert (ours[name].double() - value.double()).norm() <= 1e-9 * value.double().norm(), name


def engine(*flags: str) -> Engine:
    return Engine(parse(run_config(MODELS["spikformer"]), [*TINY, *THREE, *flags]), length=Length(3))


def samples(made: Engine, count: int) -> tuple[Tensor, Tensor]:
    images, labels = batch(made)
    return images[:count], labels[:count]


def accounts(*flags: str) -> dict[str, float]:
    """Bytes of this rank: received in a step's gathers, and as the schedule plans them; rows of weights kept, and what
    of them is allowed; of gathered weights the most at once, what may be, and what is left behind the step."""
    with engine("--neuron", "plif", *flags) as made:
        distributed, weights = made.distributed, made.plan.schedules.weights
        of_layers = [each for chunk in distributed.chunks.values() for each in chunk.parameters()]
        multiplied = {
            each.weight: each.compute_dtype.itemsize
            for chunk in distributed.chunks.values()
            for each in chunk.modules()
            if isinstance(each, (ParallelConv, ParallelLinear))
        }
        live, ready = [0], GatheredWeights.wait_unshard

        def watched(self: GatheredWeights, unit: int) -> None:
            ready(self, unit)
            places = (each for of_unit in self._units.values() for together in of_unit for each in together.values)
            storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in places}
            live.append(sum(storages.values()))

        made.train_step(*samples(made, 8))
        statistics.reset()
        with statistics.counting(), mock.patch.object(GatheredWeights, "wait_unshard", watched):
            made.train_step(*samples(made, 8))
        traffic = statistics.read()
        statistics.reset()
        schedule = made.plan.schedules.training(4 // made.state.dp.size)
        of_units = {
            unit: sum(each.numel() * multiplied.get(each, each.itemsize) for each in part.parameters())
            for unit, part in distributed.executor._chunks.items()
        }
        gathers = [action.chunk for action in schedule.actions[0] if action.kind is Kind.UNSHARD]
        kept = [e.tensor for e in distributed.tensors if e.is_parameter]
        rows = [len(each) if each.ndim else 1 for each in of_layers]
        assert weights is not None
        return dict(
            gathered=traffic["dp_shard", "all_to_all", "step"].bytes,
            planned=sum(of_units[unit] for unit in gathers),
            parameters=4 * distributed.parameters,
            kept=sum(each.nbytes for each in kept),
            allowed=sum(
                each.nbytes / made.state.dp_shard.size + each.nbytes / count
                for each, count in zip(of_layers, rows, strict=True)
            ),
            live=max(live),
            left=sum(each.untyped_storage().nbytes() for each in of_layers),
            limit=max(weights_held(schedule, made.state.pp.rank, weights.unit_bytes)),
        )


@pytest.mark.parametrize(
    ("size", "flags"),
    [(2, BY_TWO), (4, (*BY_TWO, SHARDED)), (4, (*BY_FOUR, *SCATTERED)), (2, (*BY_TWO, "--precision", "bf16"))],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_what_a_step_receives_and_a_rank_holds(ranks, size: int, flags: tuple[str, ...]) -> None:
    """Gathers receive what the schedule says: of a unit, each rank the rows of the others."""
    found, shared = ranks(size, accounts, *flags), int(flags[1])
    times = size // shared * (shared - 1)
    assert sum(each["gathered"] for each in found) == times * found[0]["planned"]
    for each in found:
        assert each["kept"] <= each["allowed"] < each["parameters"]
        assert 0 < each["live"] <= each["limit"] < each["parameters"] and not each["left"]


def built_by_layers() -> list[int]:
    """The memory of this rank's whole parameters whenever a layer has got its values."""
    held, keep = list[int](), GatheredWeights.shard
    seen = list[nn.Module]()

    def watched(self: GatheredWeights, unit: int, layers: Sequence[nn.Module]) -> None:
        seen.extend(layers)
        held.append(sum(each.untyped_storage().nbytes() for layer in seen for each in layer.parameters()))
        held.append(-sum(each.nbytes for layer in layers for each in layer.parameters()))
        keep(self, unit, layers)

    with mock.patch.object(GatheredWeights, "shard", watched), engine(*BY_TWO):
        return held


def test_a_rank_builds_one_layer_at_a_time(ranks) -> None:
    for held in ranks(2, built_by_layers):
        assert len(held) > 2 and all(whole == -own for whole, own in zip(held[::2], held[1::2], strict=True))


def test_a_flipped_bit_is_found_where_weights_are_held_twice(ranks, cache) -> None:
    found = ranks(4, train_with_flip, 3, WEIGHT, cache, *EVEN, *BY_TWO, "--check-replicas-interval", "2")
    assert all(f"{WEIGHT}, part 1 by dp_shard parallelism" in text for text in found)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--weight-parallel-size 3", "--weight-parallel-size 3"),
        ("--weight-parallel-size 8", "--weight-parallel-size 8"),
        ("--weight-parallel-size 2 --global-batch-size 12", "and 6 are on 4"),
        ("--weight-parallel-size 2 --cuda-graphs on", "with --weight-parallel-size above 1 weights do not stay"),
        ("--weight-gradients scattered", "--weight-gradients scattered needs --weight-parallel-size 2 or more"),
    ],
)
def test_bad_input_is_refused_before_anything_is_built(flags: str, told: str) -> None:
    config = parse(run_config(MODELS["spikformer"]), [*TINY, *THREE, *flags.split()])
    with pytest.raises(ConfigError) as caught:
        validate(config, 4)
    assert told in str(caught.value)


class Scaled(nn.Module):
    """Scales by the mean of a convolution's weight, which autograd adds a gradient to: the layer itself is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = ParallelConv(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.conv.weight.mean())


def scaled(**flags: Any) -> tuple[float, dict[str, Tensor]]:
    model = between(lambda: [layer("scaled", Scaled()), layer("next", ConvNormNeuron(4, 4))])
    with Engine(model, micro_batch_size=2, global_batch_size=8, train_iters=2, precision="fp64", **flags) as made:
        images = torch.rand(8, *made.config.model.input_shape, generator=torch.Generator().manual_seed(0))
        losses = [made.train_step(images, torch.arange(8) % CLASSES).loss for _ in range(2)]
        return losses[-1], made.state_dict()


def scaled_in_parts() -> tuple[float, dict[str, Tensor]]:
    return scaled(
        weight_parallel_size=2, weight_gradients="scattered", pipeline_model_parallel_size=2, pipeline_schedule="zb1p"
    )


def test_a_weight_that_a_module_of_ones_own_uses(ranks) -> None:
    """Its gradient comes with the first part of a backward, where that of its layer would come with the second."""
    (loss, weights), others = scaled(), ranks(4, scaled_in_parts)
    for found, theirs in others:
        assert found == pytest.approx(loss, rel=1e-9)
        for name, value in weights.items():
            torch.testing.assert_close(theirs[name], value, rtol=1e-9, atol=1e-12, msg=name)


def uneven() -> str:
    with engine(*BY_TWO) as made, pytest.raises(ValueError) as caught:
        made.train_step(*samples(made, 6))
    return str(caught.value)


def test_a_step_with_unequally_many_micro_batches_is_refused(ranks) -> None:
    assert all("weight_parallel_size 2" in text for text in ranks(2, uneven))
