"""Every layout of a small cluster is simulated in full: the plan is the best of them, and no bound is too high."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from megasnn.grid import Grid
from megasnn.planner.candidates import AS_FAST, Candidate, Choice, Prefer
from megasnn.planner.cluster import Cluster
from megasnn.planner.layout import Layout
from megasnn.planner.plan import plan
from megasnn.planner.predicted import Predicted
from megasnn.planner.search import Search, layouts
from megasnn.planner.step import Predictor
from tests.planner.models import analysis, cluster, config

RANKS = 4
PREFERRED: tuple[Prefer, ...] = "speed", "memory"


def on(
    device: str = "cpu-core", ranks_of_node: int = RANKS, gigabytes: float = 4.0, latency: float | None = None
) -> Cluster:
    """As if programs took no memory, beside which differences would be lost."""
    where = cluster(RANKS, gigabytes, device)
    machine = replace(where.machine, program=0.0)
    if latency is not None:
        link = replace(machine.within, latency=latency)
        machine = replace(machine, within=link, between=link)
    return replace(where, machine=machine, ranks_of_node=ranks_of_node)


CLUSTERS = {
    "cores": on(),
    "two nodes": on(ranks_of_node=2),
    "GPUs": on("h100", gigabytes=80.0),
    "slow links": on(latency=0.5),
    "less memory": on(gigabytes=9e-4),
    "little memory": on(gigabytes=5e-4),
}


@cache
def simulated(name: str) -> dict[Layout, tuple[Candidate, Predicted]]:
    """Every layout that can be, with its bounds, and its step."""
    where = CLUSTERS[name]
    search, predictor = Search(analysis(), config(), where, "speed"), Predictor(analysis(), config(), where)
    found = {}
    for each in map(search.looked_at, layouts(analysis(), config(), where)):
        if each.seconds is not None:
            found[each.layout] = each, predictor.predict(each.layout)
    return found


def need(name: str, predicted: Predicted) -> float:
    """Bytes of the largest rank."""
    predictor = Predictor(analysis(), config(), CLUSTERS[name])
    return predictor.with_program(1e6 * max(each.total - each.program for each in predicted.memory))


@pytest.mark.parametrize("name", CLUSTERS)
def test_no_bound_is_above_what_is_simulated(name: str) -> None:
    assert len(simulated(name)) > 100
    for layout, (bound, predicted) in simulated(name).items():
        assert bound.seconds is not None and bound.bytes is not None
        assert bound.seconds <= predicted.time.total * (1 + 1e-9), layout
        closer = Predictor(analysis(), config(), CLUSTERS[name]).least_bytes(layout)
        assert bound.bytes <= closer <= need(name, predicted) * (1 + 1e-9), layout


def least_need(name: str) -> float:
    """Bytes of the layout that needs least and is not slower than one device, where that fits."""
    memory = CLUSTERS[name].machine.memory
    bound, alone = simulated(name)[Layout(Grid())]
    slowest = AS_FAST * (bound.seconds or 0.0) if need(name, alone) <= memory else float("inf")
    return min(need(name, each) for _, each in simulated(name).values() if each.time.total <= slowest)


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_plan_is_the_best_of_all(name: str) -> None:
    """For speed the simplest of those that fit and are as fast within 1 %, for memory what needs least."""
    memory = CLUSTERS[name].machine.memory
    fitting = {layout: each for layout, (_, each) in simulated(name).items() if need(name, each) <= memory}
    fastest = min(each.time.total for each in fitting.values())
    as_fast = [layout for layout, each in fitting.items() if each.time.total <= 1.01 * fastest]
    fast, small = (plan(analysis(), config(), CLUSTERS[name], prefer, simulations=1000) for prefer in PREFERRED)
    assert fast.layout in as_fast and fast.layout.parts == min(layout.parts for layout in as_fast)
    assert small.bytes == least_need(name)
    assert fast.simulated < len(simulated(name)), "bounds leave some of them out"


@pytest.mark.parametrize("name", CLUSTERS)
def test_twenty_simulations_are_enough(name: str) -> None:
    """Also where little fits: what cannot is seen without a simulation, nearly always."""
    fitting = [each for _, each in simulated(name).values() if need(name, each) <= CLUSTERS[name].machine.memory]
    fast, small = (plan(analysis(), config(), CLUSTERS[name], prefer) for prefer in PREFERRED)
    assert fast.predicted.time.total <= 1.02 * min(each.time.total for each in fitting)
    assert small.bytes == least_need(name)


def test_slow_links_leave_one_device() -> None:
    others = [each.time.total for layout, (_, each) in simulated("slow links").items() if layout.ranks > 1]
    alone = simulated("slow links")[Layout(Grid())][1].time.total
    assert plan(analysis(), config(), CLUSTERS["slow links"]).layout == Layout(Grid()) and alone < min(others)


def test_as_fast_is_one_per_cent_wherever_the_times_are() -> None:
    """Of two that take as long within 1 % the simpler one is taken, in any order; beyond it the faster."""
    for seconds in (1.0, 1.0049, 1.0051, 1.0149):
        for faster, taken in ((0.9995, "1f1b"), (0.985, "zb1p")):
            simple = Candidate(Layout(Grid(pipeline=2)), seconds, 1.0, True, "")
            other = Layout(Grid(pipeline=2), schedule="zb1p", shards_optimizer=True)
            pair = [simple, Candidate(other, faster * seconds, 1.0, True, "")]
            for order in (pair, pair[::-1]):
                choice = Choice(lambda _: 0.0)
                assert choice.may_change_by(order[0])
                choice.add(order[0])
                assert choice.may_change_by(order[1]) == (order[0].layout.schedule != taken)
                choice.add(order[1])
                assert choice.taken is not None and choice.taken.layout.schedule == taken
