"""Every named schedule: the figures of the field's reference table, and validity over sizes and costs."""

import time
from collections.abc import Hashable, Sequence
from operator import le

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.schedule import (
    Action,
    ChunkCost,
    Schedule,
    ScheduleError,
    equal_costs,
    generate,
    per_stage,
    simulate,
    validate,
)
from megasnn.schedule.actions import FINISHING, PROPAGATING, Kind
from megasnn.schedule.held import Held, held_at_backwards, held_before_backwards
from megasnn.schedule.named import SCHEDULES, CostsOf, named_schedule, possible_chunks, what_it_is
from megasnn.schedule.passes import insert_gradient_sync, insert_transfers
from megasnn.schedule.zero_bubble import half_limit, min_limit

NAMES = tuple(SCHEDULES)
V_NAMES = ("zbv", "v-half", "v-min")
seconds = st.integers(1, 8).map(lambda quarter: quarter / 4)


@st.composite
def costs(draw: st.DrawFn, stages: int) -> CostsOf:
    def stage() -> ChunkCost:
        forward, inputs, weights = draw(seconds), draw(seconds), draw(seconds)
        transfer = draw(st.sampled_from([0.0, 0.25]))
        return ChunkCost(forward, inputs + weights, transfer, 1.0, inputs, weights)

    return per_stage([stage() for _ in range(stages)])


@pytest.mark.parametrize(
    ("name", "makespan", "bubble", "peak"),
    [
        ("1f1b", 33, 9, 4),
        ("zb1p", 27, 3, 4),
        ("zb2p", 27, 0, 8),
        ("zbv", 25.5, 0, 4),
        ("v-half", 26.5, 2.5, 3),
        ("v-min", 29.5, 5.5, 2),
        ("interleaved", 28.5, 4.5, 5.5),
    ],
)
def test_reference_values(name: str, makespan: float, bubble: float, peak: float) -> None:
    """Four stages, eight micro-batches, forward, input and weight gradient one each."""
    schedule = generate(name, 4, 8)
    result = simulate(schedule, equal_costs(4)(schedule.placement))
    assert result.makespan == makespan
    assert max(result.bubble) == bubble
    assert max(result.peak_activations) == peak
    assert result.busy == (24,) * 4


def promised(name: str, stages: int, micro_batches: int) -> float:
    """The activations a schedule may hold, in whole stages' micro-batches."""
    limits = {"1f1b": stages, "zb1p": stages, "zb2p": 2 * stages, "zbv": stages}
    limits |= {"v-half": half_limit(stages), "v-min": min_limit(stages)}
    return min(limits.get(name, micro_batches), micro_batches)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 8), st.integers(1, 32), st.integers(1, 4), st.data())
def test_every_size_is_valid_and_within_memory(
    name: str, stages: int, micro_batches: int, chunks: int, data: st.DataObject
) -> None:
    costs_of = data.draw(costs(stages))
    chunks_per_rank = chunks if name == "interleaved" else None
    schedule = generate(name, stages, micro_batches, chunks_per_rank, costs_of)
    validate(schedule, promised(name, stages, micro_batches))
    whole = costs_of(tuple(range(stages)))
    work = sum(cost.forward + cost.backward for cost in whole) * micro_batches
    assert sum(simulate(schedule, costs_of(schedule.placement)).busy) == pytest.approx(work)


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 8), st.integers(1, 32), st.floats(1, 16), st.sampled_from([None, 1, 2, 3, 4]), st.data())
def test_auto_is_never_worse_than_a_named_schedule_that_fits(
    stages: int, micro_batches: int, limit: float, chunks: int | None, data: st.DataObject
) -> None:
    costs_of = data.draw(costs(stages))
    fitting = []
    for name in NAMES:
        if chunks is not None and not possible_chunks(name, chunks):
            continue
        schedule = generate(name, stages, micro_batches, chunks, costs_of)
        result = simulate(schedule, costs_of(schedule.placement))
        if max(result.peak_activations) <= limit:
            fitting.append(result.makespan)
    try:
        best = generate("auto", stages, micro_batches, chunks, costs_of, limit)
    except ValueError:
        assert not fitting and chunks not in (None, 1)  # with one chunk a rank, any limit can be kept
        return
    validate(best, limit)
    assert simulate(best, costs_of(best.placement)).makespan <= min(fitting, default=float("inf"))


@given(
    data=st.data(),
    name=st.sampled_from(NAMES),
    stages=st.integers(2, 5),
    micro_batches=st.integers(1, 13),
    chunks=st.integers(1, 3),
)
def test_what_is_held_at_backwards(
    data: st.DataObject, name: str, stages: int, micro_batches: int, chunks: int
) -> None:
    """One of the orders is taken, whatever the costs: its first backwards find what is said, and none finds less."""
    if not possible_chunks(name, chunks):
        chunks = SCHEDULES[name].chunks
    schedule = named_schedule(name, stages, micro_batches, chunks, data.draw(costs(stages)))
    found = [at_backwards(schedule, rank) for rank in range(stages)]
    firsts = [tuple(cases[:1] for cases in order) for order in held_at_backwards(name, stages, micro_batches, chunks)]
    assert tuple(cases[:1] for cases in found) in firsts
    least = held_before_backwards(name, stages, micro_batches, chunks)
    for rank, ((chunk, held), *_) in enumerate(found):
        mine = [each for each, place in enumerate(schedule.placement) if place == rank]
        assert chunk == mine[-1] and all(least[each] <= count for each, count in zip(mine, held, strict=True))
    orders = held_at_backwards(name, stages, micro_batches, chunks)
    assert any(all(map(covers, found, order)) for order in orders)


def at_backwards(schedule: Schedule, rank: int) -> tuple[Held, ...]:
    """As `held_at_backwards`, counted on the actions of a schedule."""
    counts = {chunk: 0 for chunk, place in enumerate(schedule.placement) if place == rank}
    found = []
    for chunk, kind, _ in schedule.actions[rank]:
        if kind in PROPAGATING:
            found.append((chunk, tuple(counts.values())))
        counts[chunk] += (kind is Kind.FORWARD) - (kind in FINISHING)
    return tuple(found)


def covers(found: Sequence[Held], said: Sequence[Held]) -> bool:
    """Whether each case that is said is there, with as much or more."""
    return all(any(chunk == other and all(map(le, held, mine)) for other, mine in found) for chunk, held in said)


@given(st.integers(2, 5), st.integers(1, 13), st.data())
def test_schedules_that_are_the_same_under_two_names(stages: int, micro_batches: int, data: st.DataObject) -> None:
    """Those that are said to be have the same actions, whatever the costs."""
    costs_of, found = data.draw(costs(stages)), dict[Hashable, Schedule]()
    for name, named in SCHEDULES.items():
        schedule = named_schedule(name, stages, micro_batches, named.chunks, costs_of)
        same = found.setdefault(what_it_is(name, stages, micro_batches), schedule)
        assert same.actions == schedule.actions, f"{name} is said to be {same.name}"


def test_which_are_the_same() -> None:
    """On two stages all V schedules may hold the same; ZB2P warms up for longer than ZB1P where it can."""
    assert len({what_it_is(name, 2, 8) for name in V_NAMES}) == 1
    assert len({what_it_is(name, 4, 8) for name in V_NAMES}) == 3
    assert what_it_is("zb1p", 4, 1) == what_it_is("zb2p", 4, 1)
    assert what_it_is("zb1p", 4, 2) != what_it_is("zb2p", 4, 2)


@pytest.mark.parametrize("name", V_NAMES)
def test_first_and_last_chunk_of_a_v_share_a_rank(name: str) -> None:
    assert generate(name, 3, 4).placement == (0, 1, 2, 2, 1, 0)


def test_a_split_backward_on_one_rank() -> None:
    assert " ".join(map(str, generate("zb1p", 1, 2).actions[0])) == "0F0 0I0 0W0 0F1 0I1 0W1 0SYNC"


def test_receives_wait_for_their_turn_on_a_shared_link() -> None:
    rows = ("0F0 2F0 0F1 2F1", "1F0 1F1 3F0 3F1")
    orders = tuple(tuple(Action.parse(text) for text in row.split()) for row in rows)
    schedule = insert_transfers(Schedule("loop", (0, 1, 0, 1), 2, orders, forward_only=True))
    validate(schedule)
    assert " ".join(map(str, schedule.actions[1])) == (
        "1RECV_F0 1F0 1SEND_F0 3RECV_F0 1RECV_F1 1F1 1SEND_F1 3F0 3RECV_F1 3F1"
    )


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("0F0 0W0 0I0", "0W0 needs 0I0 before it"),
        ("0F0 0I0", "lacks 0W0"),
        ("0F0 0I0 0B0 0W0", "0B0 does not belong here"),
        ("0F0 0F1 0I0 0I1 0W1 0W0", "0W1 needs 0W0 before it"),
        ("0F0 0F1 0I1 0I0 0W0 0W1", "0I1 needs 0I0 before it"),
    ],
)
def test_a_wrong_split_is_seen(row: str, problem: str) -> None:
    actions = tuple(Action.parse(text) for text in row.split())
    micro_batches = 1 + max(action.micro_batch or 0 for action in actions)
    schedule = insert_gradient_sync(Schedule("wrong", (0,), micro_batches, (actions,)))
    with pytest.raises(ScheduleError, match=problem):
        validate(schedule)


def test_too_much_memory_is_marked() -> None:
    schedule = generate("gpipe", 2, 4)
    with pytest.raises(ScheduleError, match="--pipeline-memory-limit allows 3") as error:
        validate(schedule, 3)
    assert ">0F3<" in str(error.value)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="--num-virtual-stages-per-pipeline-rank 3: --pipeline-schedule zbv"):
        generate("zbv", 2, 4, 3)
    with pytest.raises(ValueError, match="unknown --pipeline-schedule 'zigzag'"):
        generate("zigzag", 2, 4)
    with pytest.raises(ValueError, match="--pipeline-memory-limit 0.5: no schedule .* the least found is 1"):
        generate("auto", 1, 4, memory_limit=0.5)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_what_has_no_name_of_its_own_says_what_it_is(limit: int) -> None:
    assert generate("auto", 4, 8, 1, memory_limit=limit).name == f"zb1p within {limit}"


def test_the_search_is_quick() -> None:
    costs_of = per_stage([ChunkCost(1 + rank / 50, 2, 0.05) for rank in range(8)])
    start = time.process_time()
    generate("auto", 8, 32, costs_of=costs_of)
    assert time.process_time() - start < 10
