"""What `tools/benchmark --plans` refuses, and how it tells of plans beside the best row."""

from __future__ import annotations

import pytest

from tools.benchmark.plans import PlansBenchmark, told_of_plans


def test_usual_flags_go_together() -> None:
    assert PlansBenchmark().problems() == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (PlansBenchmark(micro_batch_size=1), "--micro-batch-size 1 is too small for cp2"),
        (PlansBenchmark(layouts=("one", "dp3")), "--layouts dp3: known are one, one-always"),
        (PlansBenchmark(rounds=0), "--rounds"),
    ],
    ids=["samples", "layout", "rounds"],
)
def test_refused(flags: PlansBenchmark, said: str) -> None:
    (problem,) = flags.problems()
    assert said in problem


def test_a_plan_is_told_beside_the_best() -> None:
    fast = {"layout": "data 2", "plan_of": [], "step_ms": {"median": 100.0}, "all_tensors_mb": 200.0}
    taken = {"layout": "tensor 2", "plan_of": ["speed"], "step_ms": {"median": 130.0}, "all_tensors_mb": 100.0}
    (told,) = told_of_plans([fast, taken])
    assert told.startswith("plan for speed: tensor 2; 1.300 times the step of the fastest row (data 2)")
    assert "1.000 times the smallest (tensor 2)" in told
