"""Every schedule ends on a transport that waits where NCCL waits, beside tensor and data parallelism.

The suite takes a choice in which any two of these are together once: a number of stages, a number of tensor-parallel
ranks and of replicas, a schedule. Only eight stages are there with some of the schedules, one of each kind:
what waits for what is the same with four, and tests/parity/test_schedules.py runs all of them on eight, where Gloo
carries them. `pytest -m matrix` takes all.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from megasnn.config.optimizer import OptimizerConfig
from megasnn.optim.build import build_optimizer
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline.p2p import Transfers
from megasnn.schedule import Action, plan_schedule
from megasnn.schedule.actions import COMPUTE
from tests.nccl_like import nccl_like
from tests.pairwise import Pair, pairs_of, pairwise
from tests.parity import spikingjelly_reference as reference
from tests.parity.ranks import Layout, build_engine, join, one_step, record_step
from tests.parity.test_layouts import name_of
from tests.parity.test_schedules import SCHEDULES
from tests.queued_device import Device

SAMPLES, MICRO_BATCH = 9, 2  # five micro-batches, of which the last is smaller: replicas have three and two
EVEN_SAMPLES = 8  # replicas that share weights have equally many micro-batches
MOST_RANKS = 8
STEPS = 3  # in two of them memory is taken
STAGES, LIMIT = 3, 5.0  # where one rank waits for its device; seconds after which it waits for ever
ON_EIGHT_STAGES = (("1f1b", 1), ("interleaved", 3), ("zb1p", 1), ("zbv", 2))


class Case(NamedTuple):
    tensor: int
    pipeline: int
    data: int
    schedule: tuple[str, int]

    @property
    def world(self) -> tuple[int, int, int]:
        return self.tensor, self.pipeline, self.data


ALL = [Case(*values) for values in product((1, 2), (2, 3, 4, 8), (1, 2), SCHEDULES)]
ALL = [case for case in ALL if case.tensor * case.pipeline * case.data <= MOST_RANKS]
WORLDS = sorted({case.world for case in ALL})


PIPELINE, SCHEDULE = map(Case._fields.index, ("pipeline", "schedule"))


def pairs_that_matter(case: Case) -> set[Pair]:
    few = case.pipeline == 8 and case.schedule not in ON_EIGHT_STAGES
    return pairs_of(case) - {((PIPELINE, 8), (SCHEDULE, case.schedule))} if few else pairs_of(case)


SOME = pairwise(ALL, pairs_that_matter)


def _steps(device: Device, case: Case) -> list[float]:
    """The losses of some steps: in the last one no memory is taken any more."""
    state = initialize_model_parallel(tp=case.tensor, pp=case.pipeline)
    name, chunks = case.schedule
    engine = build_engine(state, plan_schedule(name, case.pipeline, chunks), torch.float64)
    images, labels = reference.data(SAMPLES)
    losses = []
    started = list(device.communicators)
    for _ in range(STEPS):
        losses.append(record_step(engine, state, images, labels, MICRO_BATCH).loss)
    assert device.communicators == started, "something in a step was a first use"
    destroy_model_parallel()
    return losses


def _run(cases: list[Case]) -> list[list[float]]:
    with nccl_like() as device:
        return [_steps(device, case) for case in cases]


@pytest.fixture(scope="module")
def loss(ranks) -> float:
    """Of one rank."""
    return ranks(1, one_step, Layout(), None, *reference.data(SAMPLES), MICRO_BATCH)[0].loss


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        *((world, SOME) for world in WORLDS),
        *(pytest.param(world, ALL, marks=pytest.mark.matrix) for world in WORLDS),
    ],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else f"of-{len(value)}",
)
def test_every_schedule_ends(ranks, loss, world, cases) -> None:
    here = [case for case in cases if case.world == world]
    tensor, pipeline, data = world
    found = ranks(tensor * pipeline * data, _run, here, timeout=120 + 10 * len(here))
    for losses in found:
        assert losses == [pytest.approx([loss] * STEPS, rel=1e-9)] * len(here)


def _owning_rows() -> list[float]:
    """The losses of some steps, behind each of which owners send the rows that they have changed."""
    with nccl_like() as device:
        state = initialize_model_parallel(pp=2)
        engine = build_engine(state, plan_schedule("zbv", 2, 2), torch.float64, rows_have_owners=True)
        optimizer = build_optimizer(engine.owned, OptimizerConfig(lr=1e-9))
        images, labels = reference.data(SAMPLES)
        started, losses = list(device.communicators), list[float]()
        for _ in range(STEPS):
            losses.append(record_step(engine, state, images, labels, MICRO_BATCH).loss)
            optimizer.step()
            engine.data_parallel.all_gather_params()
        assert device.communicators == started, "something in a step was a first use"
        destroy_model_parallel()
        return losses


def test_replicas_that_own_rows_end_too(ranks, loss) -> None:
    for losses in ranks(4, _owning_rows):
        assert losses[0] == pytest.approx(loss, rel=1e-9) and losses[1] == pytest.approx(loss, rel=1e-3)


def _finer(layout: Layout) -> list[float]:
    """The losses of some steps, of which weights are gathered or micro-batches shared."""
    with nccl_like() as device:
        state = join(layout)
        plan = plan_schedule(layout.schedule, layout.pipeline)
        engine = build_engine(state, plan, torch.float64, rows_have_owners=True, layout=layout)
        images, labels = reference.data(EVEN_SAMPLES)
        started, losses = list(device.communicators), list[float]()
        for _ in range(STEPS):
            losses.append(record_step(engine, state, images, labels, MICRO_BATCH).loss)
            engine.data_parallel.all_gather_params()
        assert device.communicators == started, "something in a step was a first use"
        destroy_model_parallel()
        return losses


@pytest.mark.parametrize(
    "layout",
    [
        Layout(4, 1, 2, "zbv", weight=2, scatters=True, recompute="always"),
        Layout(4, 1, 2, "1f1b", weight=4),
        Layout(2, 2, 2, "zbv", weight=2),
    ],
    ids=str,
)
def test_replicas_that_share_weights_end_too(ranks, layout: Layout) -> None:
    loss = ranks(1, one_step, Layout(), None, *reference.data(EVEN_SAMPLES), MICRO_BATCH)[0].loss
    for losses in ranks(layout.world_size, _finer, layout):
        assert losses == pytest.approx([loss] * STEPS, rel=1e-9)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, 1, 2, "zbv", context=2),
        Layout(1, 2, 2, "1f1b", context=2),
        Layout(2, 1, 2, "zbv", context=2, cut="rows"),
        Layout(1, 2, 2, "1f1b", context=2, cut="rows"),
    ],
    ids=name_of,
)
def test_ranks_that_share_micro_batches_end_too(ranks, layout: Layout) -> None:
    """Statistics and rows travel inside of layers, on a communicator of their own, while gradients are summed on
    another."""
    loss = ranks(1, one_step, Layout(), None, *reference.data(EVEN_SAMPLES), MICRO_BATCH)[0].loss
    for losses in ranks(layout.world_size, _finer, layout):
        assert losses == pytest.approx([loss] * STEPS, rel=1e-9)


def _all_waiting(schedules: list[tuple[str, int]]) -> list[list[float]]:
    """The losses of each schedule, when all ranks wait for their whole devices in all computations, as they may where
    kernels are loaded and memory is taken."""
    with nccl_like(LIMIT) as device:
        announce = Transfers.announce

        def announced(self: Transfers, action: Action) -> None:
            announce(self, action)
            if action.kind in COMPUTE:
                device.synchronize()

        with mock.patch.object(Transfers, "announce", announced):
            return [_steps(device, Case(1, STAGES, 1, each)) for each in schedules]


def test_all_ranks_may_wait_for_their_devices(ranks, loss) -> None:
    schedules = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb2p", 1), ("zbv", 2)]
    for losses in ranks(STAGES, _all_waiting, schedules):
        assert losses == [pytest.approx([loss] * STEPS, rel=1e-9)] * len(schedules)


def _started(tensor: int, pipeline: int) -> list[str]:
    """The communicators that a rank has started before its first step, by the transport's account."""
    with nccl_like() as device:
        state = initialize_model_parallel(tp=tensor, pp=pipeline)
        build_engine(state, "zbv", torch.float64)
        destroy_model_parallel()
        return device.communicators


def test_as_few_communicators_as_are_needed_are_started(ranks) -> None:
    for started in ranks(8, _started, 2, 2):
        # A V sends activations and gradients both ways between its two stages.
        assert [name.split()[3] for name in started] == ["collectives"] * 3 + ["messages"] * 2
    assert len(ranks(2, _started, 1, 2)[0]) == 3


def test_the_choice_has_every_schedule_with_every_number_of_stages() -> None:
    assert {(case.pipeline, case.schedule) for case in SOME} >= {
        *product((2, 3, 4), SCHEDULES),
        *product((8,), ON_EIGHT_STAGES),
    }
