"""Traffic of a training step by group, operation and phase."""

from __future__ import annotations

from megasnn.parallel.traffic import traffic
from tests.models.networks import Plain
from tests.parity.ranks import Layout, one_step


def _phases(layout: Layout) -> dict[tuple[str, str, str], int]:
    traffic.reset()
    with traffic.counting():
        one_step(Plain(), layout)
    found = {tuple(key): each.calls for key, each in traffic.counts.items()}
    traffic.reset()
    return found


def test_exchanges_are_counted_by_operation_and_phase(ranks) -> None:
    tensor = ranks(2, _phases, Layout(tensor=2))[0]
    assert {key[0] for key in tensor} == {"tp", "world"}
    assert {key[2] for key in tensor if key[0] == "world"} == {"step"}
    assert tensor["tp", "all-gather", "forward"] > 0
    assert sum(calls for (_, _, phase), calls in tensor.items() if phase == "backward") > 0
    stages = ranks(2, _phases, Layout(pipeline=2))
    messages = [{key: calls for key, calls in each.items() if key[1] == "message"} for each in stages]
    assert [*messages[0]] == [("pp", "message", "forward")]
    assert [*messages[1]] == [("backward", "message", "backward")]
    replicas = ranks(2, _phases, Layout(data=2))[0]
    assert ("dp", "all-reduce", "backward") in replicas or ("dp", "all-to-all", "backward") in replicas
