"""Every schedule ends on a transport that waits where NCCL waits, beside tensor and data parallelism.

tests/parity/test_schedules.py runs all of them where Gloo carries them.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest

from megasnn.config.optimizer import OptimizerConfig
from megasnn.engine.model import DistributedModel
from megasnn.models.build import describe_model
from megasnn.optim.build import build_optimizer
from megasnn.pipeline.p2p import Transfers
from megasnn.schedule import Action
from megasnn.schedule.actions import COMPUTE
from tests.nccl_like import Device, nccl_like
from tests.parity import spikingjelly_reference as reference
from tests.parity.ranks import Layout, built, model_config, name_of, record_step, take_steps
from tests.parity.test_schedules import SCHEDULES

SAMPLES, MICRO_BATCH = 9, 2  # five micro-batches, of which the last is smaller: replicas have three and two
EVEN_SAMPLES = 8  # replicas that share weights have equally many micro-batches
STEPS = 3  # in two of them memory is taken
STAGES, LIMIT = 3, 5.0  # where one rank waits for its device; seconds after which it waits for ever
World = tuple[int, int, int]
Schedules = tuple[tuple[str, int], ...]
OF_EACH_KIND = (("1f1b", 1), ("interleaved", 2), ("zb2p", 1), ("zbv", 2), ("auto", 1))
WORLDS: list[tuple[World, Schedules]] = [  # tensor, pipeline, data
    ((1, 4, 1), SCHEDULES),
    ((2, 2, 2), OF_EACH_KIND),
    ((1, 3, 1), (("zbv", 2), ("interleaved", 3), ("zb2p", 1), ("auto", 1))),
]


def _losses(
    device: Device,
    engine: DistributedModel,
    samples: int = SAMPLES,
    between: Callable[[], object] = lambda: None,
) -> list[float]:
    """The losses of some steps: in the second one spikes are looked at, and in the last no memory is taken any more."""
    images, labels = reference.data(samples)
    losses, started = list[float](), list(device.communicators)
    for number in range(STEPS):
        losses.append(record_step(engine, images, labels, MICRO_BATCH, observes=number == 1).loss)
        between()
    assert device.communicators == started, "something in a step was a first use"
    return losses


def _of_schedules(device: Device, world: World, schedules: Schedules) -> list[list[float]]:
    found, (tensor, pipeline, _) = list[list[float]](), world
    for name, chunks in schedules:
        with built(describe_model(model_config()), Layout(1, tensor, pipeline, name, chunks)) as engine:
            found.append(_losses(device, engine))
    return found


def _run(world: World, schedules: Schedules) -> list[list[float]]:
    with nccl_like() as device:
        return _of_schedules(device, world, schedules)


def _loss_of_one(ranks, samples: int) -> float:
    return ranks(1, take_steps, model_config(), Layout(), reference.data(samples))[0][0].loss


@pytest.fixture(scope="module")
def loss(ranks) -> float:
    """Of one rank."""
    return _loss_of_one(ranks, SAMPLES)


@pytest.mark.parametrize(("world", "schedules"), WORLDS)
def test_every_schedule_ends(ranks, loss, world: World, schedules: Schedules) -> None:
    tensor, pipeline, data = world
    found = ranks(tensor * pipeline * data, _run, world, schedules, timeout=120 + 10 * len(schedules))
    for losses in found:
        assert losses == [pytest.approx([loss] * STEPS, rel=1e-9)] * len(schedules)


def _finer(layout: Layout) -> list[float]:
    """Of which weights are gathered, micro-batches shared, or rows of weights sent by those that own them."""
    with nccl_like() as device, built(describe_model(model_config()), layout, zero1=True) as engine:
        optimizer = build_optimizer(engine.owned, OptimizerConfig(lr=1e-15))

        def between() -> None:
            optimizer.step()
            engine.gradient_buckets.all_gather_params()

        return _losses(device, engine, EVEN_SAMPLES, between=between)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, 1, 2, "zbv"),
        Layout(4, 1, 2, "zbv", weight=2, scatters=True, recompute="always"),
        Layout(4, 1, 2, "1f1b", weight=4),
        Layout(2, 2, 2, "zbv", weight=2),
        Layout(2, 1, 2, "zbv", context=2),
        Layout(1, 2, 2, "1f1b", context=2),
        Layout(2, 1, 2, "zbv", context=2, cut="rows"),
        Layout(1, 2, 2, "1f1b", context=2, cut="rows"),
    ],
    ids=name_of,
)
def test_ranks_that_share_rows_weights_or_micro_batches_end_too(ranks, layout: Layout) -> None:
    """Statistics and rows travel inside of layers, on a communicator of their own, while gradients are summed on
    another."""
    expected = pytest.approx([_loss_of_one(ranks, EVEN_SAMPLES)] * STEPS, rel=1e-9)
    assert ranks(layout.world_size, _finer, layout) == [expected] * layout.world_size


def _all_waiting(schedules: Schedules) -> list[list[float]]:
    """The losses of each schedule, when all ranks wait for their whole devices in all computations, as they may where
    kernels are loaded and memory is taken."""
    with nccl_like(LIMIT) as device:
        announce = Transfers.announce

        def announced(self: Transfers, action: Action) -> None:
            announce(self, action)
            if action.kind in COMPUTE:
                device.synchronize()

        with mock.patch.object(Transfers, "announce", announced):
            return _of_schedules(device, (1, STAGES, 1), schedules)


def test_all_ranks_may_wait_for_their_devices(ranks, loss) -> None:
    schedules = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb2p", 1), ("zbv", 2))
    for losses in ranks(STAGES, _all_waiting, schedules):
        assert losses == [pytest.approx([loss] * STEPS, rel=1e-9)] * len(schedules)


def _started(tensor: int, pipeline: int) -> list[str]:
    """The communicators that a rank has started before its first step, by the transport's account."""
    layout = Layout(1, tensor, pipeline, "zbv")
    with nccl_like() as device, built(describe_model(model_config()), layout):
        return device.communicators


def test_as_few_communicators_as_are_needed_are_started(ranks) -> None:
    for started in ranks(8, _started, 2, 2):
        # A V sends activations and gradients both ways between its two stages.
        assert [name.split()[3] for name in started] == ["collectives"] * 3 + ["messages"] * 2
    assert len(ranks(2, _started, 1, 2)[0]) == 3
