"""The rehearsal: what it finds is what was simulated, and what a worse executor would do is seen."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from megasnn.config.checks import ConfigError
from megasnn.data_parallel import BucketedDataParallel
from megasnn.data_parallel.gathered_weights import GatheredWeights
from megasnn.parallel_state import destroy_model_parallel
from megasnn.pipeline.transfers import Transfers
from tools.benchmark.links import Links
from tools.benchmark.nccl_like import nccl_like
from tools.benchmark.program import main
from tools.benchmark.queued_device import Moved
from tools.benchmark.rehearsal import Hiding, Rehearsed, computed_again, fastest, hiding, rehearsed
from tools.benchmark.rehearsal_flags import Prepared, RankStep, RehearsalBenchmark
from tools.benchmark.rehearsal_rank import Rehearsal

# Two layers a stage, 5 ms for each part of each; a message takes 2.75 ms.
FLAGS = RehearsalBenchmark(
    stages=4,
    layers=8,
    forward_ms=5,
    input_gradient_ms=5,
    weight_gradient_ms=5,
    gradient_kb=250,
    parameters_kb=100,
    latency_ms=0.25,
    steps=2,
    schedules=("gpipe", "1f1b", "interleaved", "zb1p", "zbv", "v-half"),
)
LIMIT = 0.05
TRIES = 3  # the clock also sees what else the machine does


def _run(
    flags: RehearsalBenchmark, mutated: Callable[[], AbstractContextManager[object]]
) -> list[tuple[Prepared, list[RankStep]]]:
    with nccl_like(links=flags.links) as device, mutated():
        rehearsal = Rehearsal(flags, device)
        found = [
            (
                rehearsal.prepare(name, flags.sleeping_layers()),
                [rehearsal.step(name) for _ in range(flags.steps)],
            )
            for name in flags.schedules
        ]
        destroy_model_parallel()
    return found


def _rehearse(
    ranks, flags: RehearsalBenchmark, mutated: Callable[[], AbstractContextManager[object]] = nullcontext
) -> list[tuple[Prepared, Rehearsed]]:
    """The fastest step of each schedule, with its simulation."""
    of_ranks: Sequence[Sequence[tuple[Prepared, list[RankStep]]]] = ranks(
        flags.stages * flags.replicas, _run, flags, mutated
    )
    found = []
    for each in zip(*of_ranks, strict=True):
        prepared = each[0][0]
        steps = zip(*(steps for _, steps in each), strict=True)
        found.append((prepared, fastest([rehearsed(prepared, step) for step in steps])))
    return found


def _assert_as_simulated(ranks, flags: RehearsalBenchmark) -> None:
    schedules = set(flags.schedules)
    for _ in range(TRIES):
        for prepared, found in _rehearse(ranks, replace(flags, schedules=tuple(sorted(schedules)))):
            simulated = prepared.simulation.makespan
            assert found.timeline.makespan == pytest.approx(simulated, rel=1e-3), prepared.schedule.name
            assert found.timeline.idle == pytest.approx(prepared.simulation.idle, rel=LIMIT)
            assert computed_again(found.timeline) == pytest.approx(computed_again(prepared.simulation), rel=LIMIT)
            if abs(found.makespan / simulated - 1) < LIMIT:
                schedules.remove(prepared.schedule.name)
        if not schedules:
            return
    raise AssertionError(f"by the clock, {schedules} took longer than simulated")


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("stages", [4, pytest.param(8, marks=pytest.mark.matrix)])
def test_schedules_take_as_long_as_simulated(ranks, stages: int) -> None:
    _assert_as_simulated(ranks, replace(FLAGS, stages=stages, layers=2 * stages))


@pytest.mark.alone
@pytest.mark.slow
def test_so_do_forwards_that_are_computed_again(ranks) -> None:
    _assert_as_simulated(ranks, replace(FLAGS, recompute="always", schedules=("1f1b", "zbv")))


@pytest.mark.alone
def test_so_do_schedules_whose_transfers_take_longer_than_computing(ranks) -> None:
    """15.25 ms, beside layers' parts of 5: receives wait for each other, and a link has messages of both directions."""
    slow = replace(FLAGS, gradient_kb=1500, schedules=("1f1b", "interleaved", "zbv"), micro_batches=6, steps=1)
    _assert_as_simulated(ranks, slow)


ON_TWO_STAGES = replace(FLAGS, stages=2, layers=4, gradient_kb=800, schedules=("gpipe",), steps=1)


def _posts_nothing() -> AbstractContextManager[object]:
    return mock.patch.object(Transfers, "announce", lambda *_: None)


def test_a_receive_that_is_posted_late_is_seen(ranks) -> None:
    """A message takes 8.25 ms, and the computation beside it 10."""
    ((prepared, found),) = _rehearse(ranks, ON_TWO_STAGES)
    assert found.timeline.makespan == pytest.approx(prepared.simulation.makespan, rel=1e-3)
    # The first message of each direction comes when there is nothing to compute.
    assert found.transfers == Hiding(pytest.approx(16 * 8.25e-3), pytest.approx(2 * 8.25e-3))
    ((_, worse),) = _rehearse(ranks, ON_TWO_STAGES, _posts_nothing)
    assert worse.timeline.makespan > 1.2 * prepared.simulation.makespan
    assert worse.transfers.not_hidden > 10 * 8.25e-3


REDUCING = replace(FLAGS, stages=2, replicas=2, layers=4, parameters_kb=800, schedules=("interleaved",), steps=1)


@contextmanager
def _reduces_at_the_end() -> Iterator[None]:
    reduce, wait = BucketedDataParallel._reduce_complete, BucketedDataParallel.wait

    def late(self: BucketedDataParallel) -> None:
        reduce(self)
        wait(self)

    with (
        mock.patch.object(BucketedDataParallel, "_reduce_complete", lambda self: None),
        mock.patch.object(BucketedDataParallel, "wait", late),
    ):
        yield


@pytest.mark.parametrize("rows_have_owners", [False, True])
def test_a_reduction_that_is_not_overlapped_is_seen(ranks, rows_have_owners: bool) -> None:
    """Each rank has two chunks, and so two buckets; only that of the first chunk comes when all is computed. While the
    other one is reduced a rank may wait for a message."""
    flags = replace(REDUCING, use_distributed_optimizer=rows_have_owners)
    ((_, found),) = _rehearse(ranks, flags)
    ((_, worse),) = _rehearse(ranks, flags, _reduces_at_the_end)
    # Owners give the rows that they have changed back behind the step, which is as many bytes again.
    bucket = 2 * (0.25e-3 + 400e3 / 100e6) / (2 if rows_have_owners else 1)
    shared = 4 * bucket if rows_have_owners else 0.0
    assert worse.reductions == Hiding(pytest.approx(4 * bucket + shared, rel=0.02), worse.reductions.seconds)
    assert found.reductions.seconds == pytest.approx(worse.reductions.seconds)
    assert 1.98 * bucket < found.reductions.not_hidden - shared < 2.3 * bucket


# A gather takes 2.75 ms.
GATHERING = replace(
    FLAGS, stages=2, replicas=2, weight_parallel_size=2, parameters_kb=500, schedules=("1f1b", "zb1p", "zbv"), steps=1
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(GATHERING, id="4 ranks", marks=pytest.mark.matrix),
        pytest.param(replace(GATHERING, stages=4, layers=16), id="8 ranks"),
    ],
)
def test_gathers_of_weights_are_hidden(ranks, flags: RehearsalBenchmark) -> None:
    for prepared, found in _rehearse(ranks, flags):
        assert found.gathers.seconds > 50 * 2.7e-3
        assert found.gathers.not_hidden <= 0.1 * found.gathers.seconds, prepared.schedule.name
        assert found.timeline.makespan == pytest.approx(prepared.simulation.makespan, rel=1e-3)


@contextmanager
def _gathers_at_the_use() -> Iterator[None]:
    gather, ready = GatheredWeights.gather, GatheredWeights.ready

    def late(self: GatheredWeights, unit: int) -> None:
        if unit not in self._live:
            gather(self, unit)
        ready(self, unit)

    with (
        mock.patch.object(GatheredWeights, "gather", lambda self, unit: None),
        mock.patch.object(GatheredWeights, "ready", late),
    ):
        yield


def test_gathers_that_begin_late_are_seen(ranks) -> None:
    flags = replace(GATHERING, schedules=("1f1b",))
    ((prepared, found),) = _rehearse(ranks, flags, _gathers_at_the_use)
    assert found.timeline.makespan > 1.1 * prepared.simulation.makespan


def test_what_is_hidden_is_beside_computing() -> None:
    moved = [[(0.0, 3.0), (6.0, 7.0)], [(5.0, 6.0)]]
    moved = [[Moved("receive", "up", None, *times) for times in row] for row in moved]
    assert hiding(moved, [[(1.0, 2.0), (2.5, 6.5)], []]) == Hiding(5.0, 3.0)


def test_links() -> None:
    """4 ranks, a latency of 1 s, 10 bytes a second."""
    links = Links(1.0, 0.1)
    assert links.message(20) == 3
    assert links.all_gather(4, of_each=20) == 9
    assert links.all_reduce(4, 80) == 18  # as its two halves, a scatter and a gather of a quarter each
    assert links.all_to_all(4, given=60, taken=30) == 9
    assert links.broadcast(5, 20) == 9 and links.barrier(4) == 2 and links.barrier(1) == 0


def test_what_cannot_be_rehearsed_is_refused() -> None:
    wrong = RehearsalBenchmark(
        stages=8, layers=4, schedules=("zigzag",), recompute="often", bandwidth=0, use_distributed_optimizer=True
    )
    with pytest.raises(ConfigError) as error:
        wrong.check()
    for text in ("'zigzag' is none", "'often' is none", "--bandwidth must", "--layers 4 are too few", "--replicas 2"):
        assert text in str(error.value)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_the_program(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small = "--stages 2 --layers 4 --micro-batches 3 --forward-ms 5 --steps 1 --schedules 1f1b zbv".split()
    arguments = ["--rehearsal", *small, "--pictures", str(tmp_path / "drawn"), "--output", str(tmp_path / "log.jsonl")]
    assert main(arguments) == 0
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == ["rehearsal 1f1b", "rehearsal zbv"]
    for line in lines:
        assert line["stream_ms"] == pytest.approx(line["simulated_ms"])
        assert 0 < line["transfers_s"]["not_hidden"] < line["transfers_s"]["seconds"]
        assert len(line["rehearsed_bubble"]) == 2
    assert len(list((tmp_path / "drawn").glob("*.svg"))) == 4
    assert "rehearsed/" in capfd.readouterr().out
