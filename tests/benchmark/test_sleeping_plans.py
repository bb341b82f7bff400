"""Whole steps of 4 ranks and more take as long as the planner foresees, and what it takes is the fastest."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from megasnn.config.checks import ConfigError
from megasnn.grid import Grid
from megasnn.pipeline.costs import LinkCost
from megasnn.planner.layout import Layout
from megasnn.planner.plan import plan
from megasnn.planner.predicted import Predicted
from megasnn.planner.step import Predictor
from tests.benchmark.test_rehearsal import _reduces_at_the_end as reduces_at_the_end
from tools.benchmark.links import Links
from tools.benchmark.nccl_like import nccl_like
from tools.benchmark.plans_asleep import to_try
from tools.benchmark.plans_asleep_flags import SleepingPlansBenchmark, buckets_of
from tools.benchmark.plans_asleep_rank import LayoutsAsleep, Whole, slowest
from tools.benchmark.program import main

LIMIT = 0.05
TRIES = 3  # the clock also sees what else the machine does
FLAGS = SleepingPlansBenchmark(
    ranks=(4,),
    micro_batches=10,
    layers=8,
    forward_ms=5,
    input_gradient_ms=4,
    weight_gradient_ms=3,
    growth=3.0,
    bucket_kb=400,
    bandwidth=40.0,
    steps=2,
)


def _of(flags: SleepingPlansBenchmark, ranks: int) -> Predictor:
    return Predictor(flags.analysis(), flags.configuration(), flags.cluster(ranks))


def _predicted(flags: SleepingPlansBenchmark, layouts: Sequence[Layout]) -> list[Predicted]:
    with buckets_of(round(1e3 * flags.bucket_kb)):
        return [_of(flags, each.ranks).predict(each) for each in layouts]


def _run(
    flags: SleepingPlansBenchmark,
    turns: Sequence[tuple[Layout, Sequence[range]]],
    mutated: Callable[[], AbstractContextManager[object]],
) -> list[list[Whole]]:
    with nccl_like(links=flags.links) as device, mutated():
        rehearsal = LayoutsAsleep(flags, device)
        return [rehearsal.steps(*turn) for turn in turns]


def _rehearse(
    ranks,
    flags: SleepingPlansBenchmark,
    layouts: Sequence[Layout],
    predicted: Sequence[Predicted],
    mutated: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[Whole]:
    """The fastest step of each layout, on its slowest rank."""
    turns = [(layout, each.bounds) for layout, each in zip(layouts, predicted, strict=True)]
    of_ranks = ranks(layouts[0].ranks, _run, flags, turns, mutated)
    found = []
    for each in zip(*of_ranks, strict=True):
        found.append(Whole(*map(min, zip(*slowest(each), strict=True))))
    return found


def _assert_as_foreseen(ranks, flags: SleepingPlansBenchmark, layouts: Sequence[Layout], by_clock: bool = True) -> None:
    left = list(layouts)
    for _ in range(TRIES):
        predicted = _predicted(flags, left)
        late = []
        for layout, each, found in zip(left, predicted, _rehearse(ranks, flags, left, predicted), strict=True):
            assert found.stream == pytest.approx(each.time.total, rel=0.01), str(layout)
            late += [layout] * (by_clock and abs(found.clock / each.time.total - 1) > LIMIT)
        if not late:
            return
        left = late
    raise AssertionError(f"by the clock, not as long as foreseen: {'; '.join(map(str, left))}")


FOUR = [
    Layout(Grid(data=4)),  # of 10 micro-batches, some replicas have more
    Layout(Grid(data=4), shards_optimizer=True),
    Layout(Grid(pipeline=2, data=2), schedule="zbv", chunks=2),
    Layout(Grid(pipeline=2, data=2), schedule="zb1p", recompute="always"),
    Layout(Grid(pipeline=2, weight=2), schedule="interleaved", chunks=2),
    Layout(Grid(pipeline=4), schedule="1f1b"),
]


def _more(ranks: int) -> list[Layout]:
    half, quarter = ranks // 2, ranks // 4
    return [
        Layout(Grid(data=ranks)),
        Layout(Grid(data=half, weight=2)),
        Layout(Grid(pipeline=2, data=half), shards_optimizer=True),
        Layout(Grid(pipeline=4, data=quarter), schedule="gpipe"),
        Layout(Grid(pipeline=4, data=quarter), schedule="zb2p"),
        Layout(Grid(pipeline=4, data=quarter), schedule="v-half", chunks=2, recompute="always"),
        Layout(Grid(pipeline=4, weight=quarter), schedule="v-min", chunks=2),
        Layout(Grid(pipeline=8, data=ranks // 8), schedule="1f1b"),
    ]


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "layouts"),
    [
        pytest.param(FLAGS, FOUR, id="4"),
        pytest.param(replace(FLAGS, micro_batches=34), FOUR, id="4, longer", marks=pytest.mark.matrix),
        pytest.param(replace(FLAGS, layers=16, micro_batches=32), _more(8), id="8", marks=pytest.mark.matrix),
        pytest.param(
            replace(FLAGS, layers=16, micro_batches=64, forward_ms=10, input_gradient_ms=8, weight_gradient_ms=6),
            _more(16),
            id="16",
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_steps_take_as_long_as_foreseen(ranks, flags: SleepingPlansBenchmark, layouts: list[Layout]) -> None:
    _assert_as_foreseen(ranks, flags, layouts)


def test_so_do_steps_with_weights_by_rows(ranks) -> None:
    """By the stream alone: many small gathers keep two cores busy."""
    layouts = [Layout(Grid(data=2, weight=2)), Layout(Grid(weight=4)), Layout(Grid(weight=4), recompute="always")]
    layouts += [Layout(Grid(data=2, weight=2), shards_optimizer=True)]
    _assert_as_foreseen(ranks, replace(FLAGS, micro_batches=8), layouts, by_clock=False)


def test_replicas_that_would_gather_in_other_orders_are_refused() -> None:
    with pytest.raises(ValueError, match="replicas have 2 and 3 micro-batches"):
        _predicted(FLAGS, [Layout(Grid(weight=4))])


def test_a_reduction_that_is_not_overlapped_is_not_what_was_foreseen(ranks) -> None:
    layouts = [Layout(Grid(data=2)), Layout(Grid(pipeline=2), schedule="1f1b")]
    predicted = _predicted(FLAGS, layouts)
    late, same = _rehearse(ranks, FLAGS, layouts, predicted, reduces_at_the_end)
    assert late.stream > (1 + LIMIT) * predicted[0].time.total
    assert same.stream == pytest.approx(predicted[1].time.total, rel=0.01)


@pytest.mark.parametrize("count", [pytest.param(4, id="4"), pytest.param(8, id="8", marks=pytest.mark.matrix)])
def test_the_plan_is_the_fastest(ranks, count: int) -> None:
    flags = replace(FLAGS, layers=8, micro_batches=2 * count, best=4 if count == 4 else 12)
    with buckets_of(round(1e3 * flags.bucket_kb)):
        found = plan(flags.analysis(), flags.configuration(), flags.cluster(count))
        tried = [each for each in to_try(flags, found, count) if each.layout.ranks == count]
        alone = _of(flags, 1).predict(Layout(Grid()))
    tried = tried if count > 4 else tried[:4]
    assert tried[0].why == "plan" and tried[0].layout == found.layout
    steps = _rehearse(ranks, flags, [each.layout for each in tried], [each.predicted for each in tried])
    assert steps[0].stream <= 1.05 * min(each.stream for each in steps)
    assert steps[0].stream < alone.time.total


def test_slower_is_all_of_it() -> None:
    layouts = [Layout(Grid(data=4), shards_optimizer=True), Layout(Grid(pipeline=4), schedule="zb1p")]
    usual, slow = (_predicted(replace(FLAGS, slower=slower), layouts) for slower in (1.0, 8.0))
    for one, other in zip(usual, slow, strict=True):
        assert other.time.total == pytest.approx(8 * one.time.total, rel=1e-9)


def test_one_of_each_kind_is_tried() -> None:
    flags = replace(FLAGS, micro_batches=16, best=2)
    with buckets_of(round(1e3 * flags.bucket_kb)):
        tried = to_try(flags, plan(flags.analysis(), flags.configuration(), flags.cluster(4)), 4)
    found = [each.layout for each in tried]
    names = {each.schedule for each in found if each.grid.pipeline > 1}
    assert {"gpipe", "1f1b", "interleaved", "zb1p", "zb2p", "zbv", "v-half", "v-min"} <= names
    assert any(each.ranks == 1 for each in found) and any(each.shards_optimizer for each in found)
    assert any(each.grid.data == 4 for each in found) and any(each.grid.weight > 1 for each in found)
    assert any(each.recompute == "always" for each in found) and len(set(found)) == len(found)


def test_no_step_beats_its_bound() -> None:
    predictor = _of(FLAGS, 4)
    with buckets_of(round(1e3 * FLAGS.bucket_kb)):
        found = plan(FLAGS.analysis(), FLAGS.configuration(), FLAGS.cluster(4), simulations=1)
        possible = [each.layout for each in found.candidates if each.seconds is not None]
        compared = [(predictor.least(each)[0], predictor.predict(each).time.total) for each in possible]
    assert len(compared) > 50 and all(bound <= whole * (1 + 1e-9) for bound, whole in compared)


def test_collectives_are_foreseen_as_they_are_rehearsed() -> None:
    links, link = Links(1.0, 0.1), LinkCost(1.0, 0.1)
    assert link.all_reduce(4, 80, on_gpu=False) == links.all_reduce(4, 80)
    assert link.exchange(4, 20) == links.all_to_all(4, given=60, taken=60)
    assert link.all_reduce(1, 80, on_gpu=False) == 0
    assert link.all_reduce(1024, 0, on_gpu=True) == 20  # two trees of ten steps


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        SleepingPlansBenchmark(ranks=(1,), layers=0, bandwidth=0, update_ms=-1).check()
    for text in ("--ranks 1: give", "--layers must", "--bandwidth must", "--update-ms must"):
        assert text in str(error.value)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_the_program(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small = "--ranks 2 --layers 4 --micro-batches 4 --forward-ms 2 --best 2 --rounds 1".split()
    assert main(["--sleeping-plans", *small, "--output", str(tmp_path / "log.jsonl")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines[0]["why"] == "plan" and {line["devices"] for line in lines} == {1, 2}
    for line in lines:
        assert line["stream_ms"] == pytest.approx(line["predicted_ms"], rel=0.01), line["row"]
    assert "times as long as the best" in capfd.readouterr().out
