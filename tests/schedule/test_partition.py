from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.schedule.partition import (
    balanced_bounds,
    layout_to_bounds,
    loop_placement,
    parse_layout,
    placed_bounds,
    v_placement,
)

UNITS = ["stem"] * 3 + ["block 0"] * 2 + ["block 1"] * 2 + ["head"]


def cover(bounds: list[range]) -> list[int]:
    return [layer for bound in bounds for layer in bound]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.integers(1, 5))
def test_no_partition_is_better(costs: list[int], parts: int) -> None:
    if parts > len(costs):
        with pytest.raises(ValueError, match="more|leave"):
            balanced_bounds(costs, parts)
        return
    bounds = balanced_bounds(costs, parts)
    assert cover(bounds) == list(range(len(costs)))
    assert len(bounds) == parts and all(bounds)

    def rating(ends: tuple[int, ...]) -> tuple[int, int]:
        sums = [sum(costs[a:b]) for a, b in zip((0, *ends), (*ends, len(costs)), strict=True)]
        return max(sums), sum(s * s for s in sums)

    best = min(rating(ends) for ends in combinations(range(1, len(costs)), parts - 1))
    assert rating(tuple(bound.stop for bound in bounds[:-1])) == best


@pytest.mark.parametrize("layers", [9, 60])
@settings(max_examples=25, deadline=None)
@given(st.sampled_from([v_placement(2), v_placement(4), loop_placement(2, 3), loop_placement(3)]), st.data())
def test_ranks_with_several_chunks_are_balanced(layers: int, placement: tuple[int, ...], data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(1, 20), min_size=layers, max_size=layers))
    bounds, plain = placed_bounds(costs, placement), balanced_bounds(costs, len(placement))
    assert cover(bounds) == list(range(layers)) and all(bounds)

    def rating(cut: list[range]) -> float:
        spans = [sum(costs[i] for i in span) for span in cut]
        loads = [sum(s for s, home in zip(spans, placement, strict=True) if home == rank) for rank in set(placement)]
        return max(loads) + max(spans) / 8

    assert rating(bounds) <= rating(plain)
    if len(set(placement)) == len(placement):
        assert bounds == plain


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_impossible_costs_are_refused(cost: float) -> None:
    with pytest.raises(ValueError, match=f"{cost}"):
        balanced_bounds([1.0, cost], 2)


@pytest.mark.parametrize("layout", ["1|2|2|1", "1,2,2,1", " 1 | 2|2 |1"])
def test_layout_notations(layout: str) -> None:
    assert parse_layout(layout) == (1, 2, 2, 1)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("", "no list of whole numbers"),
        ("1|x", "1|x"),
        ("1||2", "no list of whole numbers"),
        ("1|-2|3", "-2 is negative"),
        ("0|0", "holds no layer"),
    ],
)
def test_layouts_that_are_refused(layout: str, message: str) -> None:
    with pytest.raises(ValueError, match="--pipeline-model-parallel-layout") as error:
        parse_layout(layout)
    assert message in str(error.value)


def test_a_layout_counts_units_or_layers() -> None:
    assert layout_to_bounds((1, 3), UNITS) == [range(0, 3), range(3, 8)]
    assert layout_to_bounds((5, 3), UNITS) == [range(0, 5), range(5, 8)]
    assert layout_to_bounds((1, 0, 3), UNITS) == [range(0, 3), range(3, 3), range(3, 8)]


def test_a_layout_of_another_sum_or_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r'"2\|3" sums to 5; the model has 4 units .* of together 8 layers'):
        layout_to_bounds((2, 3), UNITS)
    with pytest.raises(ValueError, match="has 2 entries for 4 chunks"):
        layout_to_bounds((1, 3), UNITS, chunks=4)
