"""Rows of images are given to the ranks that need them, and their gradients go back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megasnn.kernels.spike_codec import Content
from megasnn.parallel.rows import NO_ROW, RowMove, move_rows, shared_rows
from megasnn.parallel.traffic import statistics
from tests.distributed.whole import channels_last, everybody, random, spikes

HEIGHT, WIDTH, C = 9, 3, 4
HALO = ((0, 1, 2, 3), (2, 3, 4, 5, 6), (5, 6, 7, 8, NO_ROW))
CASES = {
    "halo": HALO,
    "far": ((8, 0, 1), (NO_ROW, 0, 1, 8, 8), (2, 2, 5)),
    "everything": (tuple(range(HEIGHT)),) * 3,
    "nothing on one": ((0,), (), (3, 4, 5, 6)),
}


@given(height=st.integers(1, 40), ranks=st.integers(1, 9), data=st.data())
def test_runs_give_each_rank_what_it_needs(height, ranks, data) -> None:
    if height < ranks:
        with pytest.raises(ValueError, match=f"may be {height} at most"):
            shared_rows(height, ranks)
        return
    owned = shared_rows(height, ranks)
    assert [row for rows in owned for row in rows] == list(range(height))
    assert max(map(len, owned)) - min(map(len, owned)) <= 1
    needed = tuple(tuple(data.draw(st.lists(st.integers(-1, height - 1), max_size=12))) for _ in owned)
    move = RowMove(owned, needed)
    for to, rows in enumerate(needed):
        found = [NO_ROW] * len(rows)
        for owner, first, place, length in move.runs(to):
            assert first + length <= len(owned[owner])
            found[place : place + length] = owned[owner][first : first + length]
        assert found == list(rows)
        assert sum(move.rows(to, owner) for owner in range(ranks)) == len(rows) - rows.count(NO_ROW)
    assert move.is_needed == (needed != tuple(map(tuple, owned)))


def _moved(needed: tuple[tuple[int, ...], ...], content: Content) -> tuple:
    group = everybody("context")
    move = RowMove(shared_rows(HEIGHT, group.size), needed)
    shape = (2, 3, C, HEIGHT, WIDTH)
    images = {
        Content.DENSE: random(*shape, seed=1),
        Content.SPIKES: spikes(*shape, seed=1),
        Content.COUNTS: (random(*shape, seed=1) * 20).abs().round(),
    }[content]
    own = move.owned[group.rank]
    x = channels_last(images[:, :, :, own.start : own.stop]).requires_grad_()
    statistics.reset()
    with statistics.counting():
        y = move_rows(x, move, group, content)
    padded = torch.cat([images, torch.zeros_like(images[:, :, :, :1])], 3)
    expected = padded[:, :, :, [row if row != NO_ROW else HEIGHT for row in needed[group.rank]]]
    assert torch.equal(y, expected) and y.movedim(2, -1).is_contiguous()
    weights = random(*y.shape, seed=10 + group.rank)
    (y * weights).sum().backward()
    return x.grad, weights, statistics.total("context").bytes, own


@pytest.mark.parametrize("content", list(Content))
@pytest.mark.parametrize("case", CASES)
def test_rows_and_their_gradients_arrive(ranks, case, content) -> None:
    found = ranks(3, _moved, CASES[case], content)
    expected = torch.zeros(2, 3, C, HEIGHT, WIDTH, dtype=torch.float64)
    for (_, weights, _, _), rows in zip(found, CASES[case], strict=True):
        for place, row in enumerate(rows):
            if row != NO_ROW:
                expected[:, :, :, row] += weights[:, :, :, place]
    torch.testing.assert_close(torch.cat([gradient for gradient, *_ in found], 3), expected)
    values = 2 * 3 * C * WIDTH
    for rank, (*_, moved, own) in enumerate(found):
        foreign = [[row for row in CASES[case][rank] if row in rows] for rows in (f[3] for f in found) if rows != own]
        size = {Content.DENSE: 8.0, Content.SPIKES: 1 / 8, Content.COUNTS: 1.0}[content]
        assert moved == sum(size * values * len(rows) for rows in foreign)


def _too_many() -> None:
    group = everybody("context")
    move = RowMove(shared_rows(HEIGHT, group.size), HALO)
    with pytest.raises(ValueError, match="is given 4"):
        move_rows(random(1, 1, C, 4, WIDTH), move, group, Content.DENSE)


def test_another_number_of_rows_is_refused(ranks) -> None:
    ranks(3, _too_many)
