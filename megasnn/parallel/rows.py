"""Rows of images that ranks share out: which rank has which, and how a rank is given those that it needs.

A tensor `[T, N, C, H, W]` that is cut by rows lies on each rank of a group as some neighbouring rows of all its images.
A layer that mixes rows, as a convolution does, is given what it needs of others' rows first: packed by what they hold.
Backward, their gradients go back to whoever has the rows, dense, and are added there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megasnn.again import is_again, once
from megasnn.kernels.spike_codec import Content, decode_into, encode, encoded_like
from megasnn.parallel.collectives import Exchange, start_exchange
from megasnn.parallel.sharding import own_rows
from megasnn.parallel_state import Group

NO_ROW = -1
"""In the place of a row outside of the image, which is zero."""


def shared_rows(height: int, ranks: int) -> tuple[range, ...]:
    """The rows of images of some height that each rank has, wherever nothing else is said: as evenly as possible.

    Raises:
        ValueError: fewer rows than ranks.
    """
    if height < ranks:
        raise ValueError(
            f"there are {height} row(s) for {ranks} ranks: with --context-parallel-cut rows, --context-parallel-size "
            f"may be {height} at most here"
        )
    return tuple(own_rows(height, ranks, rank) for rank in range(ranks))


class Run(NamedTuple):
    """Rows that lie side by side both at their owner and where they are needed: the first of them at either, and how
    many."""

    owner: int
    first: int
    place: int
    length: int

    def squares(self, pool: int) -> range:
        """Where they are needed, the rows of squares of so many pixels that they belong to."""
        return range(self.place // pool, (self.place + self.length - 1) // pool + 1)


@dataclass(frozen=True)
class RowMove:
    """
    Attributes:
        owned: the rows of the image that each rank has.
        needed: the rows that each rank needs, in order; a row may come more than once, and be `NO_ROW`.
    """

    owned: tuple[range, ...]
    needed: tuple[tuple[int, ...], ...]

    @property
    def is_needed(self) -> bool:
        """Whether a rank needs anything else than it has."""
        return any(tuple(own) != needed for own, needed in zip(self.owned, self.needed, strict=True))

    def runs(self, to: int) -> tuple[Run, ...]:
        """What a rank is given, its own rows among it."""
        return _runs(self.owned, self.needed[to])

    def rows(self, to: int, owner: int) -> int:
        """How many rows one rank gives to another."""
        return sum(run.length for run in self.runs(to) if run.owner == owner)


@lru_cache(maxsize=4096)
def _runs(owned: tuple[range, ...], needed: tuple[int, ...]) -> tuple[Run, ...]:
    runs: list[Run] = []
    for place, row in enumerate(needed):
        if row == NO_ROW:
            continue
        owner = next(rank for rank, rows in enumerate(owned) if row in rows)
        first, last = row - owned[owner].start, runs[-1] if runs else None
        if last and (last.owner, last.first + last.length, last.place + last.length) == (owner, first, place):
            runs[-1] = last._replace(length=last.length + 1)
        else:
            runs.append(Run(owner, first, place, 1))
    return tuple(runs)


def move_rows(x: Tensor, move: RowMove, group: Group, content: Content, pool: int = 1) -> Tensor:
    """Gives each rank the rows that it needs: `[T, N, C, own rows, W]` -> `[T, N, C, needed rows, W]`, channels last.

    Collective, forward and backward: every rank is to use its result, also where it has no rows.

    Args:
        pool: the result is average-pooled over squares of so many pixels, without overlap, and used in no other way:
            so that the gradients of a square are equal, and one of them travels.
    Raises:
        ValueError: another number of rows than this rank has.
    """
    if x.shape[3] != len(move.owned[group.rank]):
        raise ValueError(f"a rank that has the rows {move.owned[group.rank]} of each image is given {x.shape[3]}")
    moved: Tensor = _MoveRows.apply(x, move, group, content, pool)
    return moved


def lend_rows(x: Tensor, move: RowMove, group: Group) -> tuple[Tensor, Tensor]:
    """The same rows `[T, N, C, own rows, W]`, which are lent to others, and those that others lend to this rank, all of
    them not its own. Collective, forward and backward: what comes back is added to the gradient of the first, in place.
    """
    mine, lent = _LendRows.apply(x, move, group)
    return mine, lent


class _LendRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, move: RowMove, group: Group) -> tuple[Tensor, Tensor]:
        ctx.move, ctx.group = move, group
        images = x.movedim(2, -1)
        arrived = start_rows(images, move, group, Content.DENSE)
        taken = images.new_empty((*images.shape[:2], len(move.needed[group.rank]), *images.shape[3:]))
        put_rows(taken, arrived(), move, group, Content.DENSE)
        return x.view_as(x), taken.movedim(-1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_lent: Tensor) -> tuple[Tensor, None, None]:
        exchange = start_gradients(of_lent.movedim(2, -1), ctx.move, ctx.group)
        add_gradients(grad.movedim(2, -1), exchange.wait(), ctx.move, ctx.group)
        return grad, None, None


class _MoveRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, move: RowMove, group: Group, content: Content, pool: int) -> Tensor:
        ctx.move, ctx.group, ctx.pool = move, group, pool
        images = x.movedim(2, -1)
        arrived = start_rows(images, move, group, content)
        outside = NO_ROW in move.needed[group.rank]
        shape = (*images.shape[:2], len(move.needed[group.rank]), *images.shape[3:])
        taken = images.new_zeros(shape) if outside else images.new_empty(shape)
        for run in move.runs(group.rank):  # while others' travel
            if run.owner == group.rank:
                _rows(taken, run.place, run.length).copy_(_rows(images, run.first, run.length))
        put_rows(taken, arrived(), move, group, content)
        return taken.movedim(-1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Adds this rank's own gradient first, and then those of others in their order."""
        move, group, pool = ctx.move, ctx.group, ctx.pool
        images = grad.movedim(2, -1)
        exchange = start_gradients(images, move, group, pool)
        own = [run for run in move.runs(group.rank) if run.owner == group.rank]
        total = _own(images, own, len(move.owned[group.rank]))
        add_gradients(total, exchange.wait(), move, group, pool)
        return total.movedim(-1, 2), None, None, None, None


def start_rows(images: Tensor, move: RowMove, group: Group, content: Content) -> Callable[[], list[Tensor]]:
    """Starts sending others what they need of this rank's `[T, N, rows, W, C]`. Collective.

    The returned function, to be called once, waits for what this rank is given, by rank, packed; see `put_rows`. Where
    a forward is computed again, nothing travels.
    """
    if is_again():
        return partial(once, list[Tensor])
    outgoing = [encode(_joined(images, _given(move, to, group)), content, check=True) for to in _others(group)]
    sent = {to: len(each) for to, each in zip(_others(group), outgoing, strict=True)}
    exchange = start_exchange(
        torch.cat(outgoing),
        [sent.get(rank, 0) for rank in range(group.size)],
        [_length(images, move.rows(group.rank, rank), content) for rank in range(group.size)],
        group,
        "forward",
    )
    return partial(once, exchange.wait)


def put_rows(taken: Tensor, parts: Sequence[Tensor], move: RowMove, group: Group, content: Content) -> None:
    """Unpacks others' rows to their places in `[T, N, needed rows, W, C]`. Args: parts: by rank, as they travelled."""
    for owner in _others(group):
        its = [run for run in move.runs(group.rank) if run.owner == owner]
        if its:
            rows = taken.new_empty((*taken.shape[:2], sum(run.length for run in its), *taken.shape[3:]))
            decode_into(parts[owner], content, rows.view(-1, taken.shape[-1]))
            for run, part in zip(its, rows.split([run.length for run in its], dim=2), strict=True):
                _rows(taken, run.place, run.length).copy_(part)


def start_gradients(images: Tensor, move: RowMove, group: Group, pool: int = 1) -> Exchange:
    """Starts sending the gradients of what this rank was given, `[T, N, needed rows, W, C]`, to the owners, dense.
    Collective. Args: pool: as of `move_rows`."""
    runs = move.runs(group.rank)
    outgoing = [_squares(images, [run for run in runs if run.owner == owner], pool) for owner in _others(group)]
    sent = {owner: len(each) for owner, each in zip(_others(group), outgoing, strict=True)}
    one = images.shape[0] * images.shape[1] * (images.shape[3] // pool) * images.shape[4]  # row of squares
    return start_exchange(
        torch.cat(outgoing),
        [sent.get(rank, 0) for rank in range(group.size)],
        [one * sum(len(run.squares(pool)) for run in _given(move, rank, group)) for rank in range(group.size)],
        group,
        "backward",
    )


def add_gradients(total: Tensor, parts: Sequence[Tensor], move: RowMove, group: Group, pool: int = 1) -> None:
    """Adds what others have sent by `start_gradients`, by rank, to the gradient of own rows, `[T, N, rows, W, C]`."""
    for rank in _others(group):
        _add_squares(total, parts[rank], _given(move, rank, group), pool)


def _given(move: RowMove, to: int, group: Group) -> list[Run]:
    """What this rank gives to one."""
    return [run for run in move.runs(to) if run.owner == group.rank]


def _own(images: Tensor, runs: Sequence[Run], length: int) -> Tensor:
    """What a rank's own rows, so many, get from the gradient of what it was given: a copy."""
    if [(run.first, run.length) for run in runs] == [(0, length)]:  # nearly always
        return _rows(images, runs[0].place, length).clone(memory_format=torch.contiguous_format)
    total = images.new_zeros((*images.shape[:2], length, *images.shape[3:]))
    for run in runs:
        _rows(total, run.first, run.length).add_(_rows(images, run.place, run.length))
    return total


def _others(group: Group) -> list[int]:
    return [rank for rank in range(group.size) if rank != group.rank]


def _rows(images: Tensor, first: int, length: int) -> Tensor:
    """Of images `[T, N, rows, W, C]`."""
    return images.narrow(2, first, length)


def _joined(images: Tensor, runs: Sequence[Run]) -> Tensor:
    """Some rows as a flat tensor."""
    parts = [_rows(images, run.first, run.length) for run in runs]
    return torch.cat(parts, dim=2).reshape(-1) if parts else images.new_empty(0)


def _squares(images: Tensor, runs: Sequence[Run], pool: int) -> Tensor:
    """One value of each square of some rows `[T, N, rows, W, C]`, in which all values are equal, as a flat tensor."""
    columns = images.shape[3] // pool * pool
    rows = [slice(run.squares(pool).start * pool, run.squares(pool).stop * pool, pool) for run in runs]
    parts = [images[:, :, each, :columns:pool] for each in rows]
    return torch.cat(parts, dim=2).reshape(-1) if parts else images.new_empty(0)


def _add_squares(total: Tensor, values: Tensor, runs: Sequence[Run], pool: int) -> None:
    """Adds what `_squares` has given of some runs to the owner's rows."""
    lengths = [len(run.squares(pool)) for run in runs]
    width = total.shape[3] // pool
    of_runs = values.view(*total.shape[:2], sum(lengths), width, total.shape[4]).split(lengths, dim=2)
    for run, part in zip(runs, of_runs, strict=True):
        if pool > 1:
            part = part.repeat_interleave(pool, dim=2).repeat_interleave(pool, dim=3)
            part = _rows(part, run.place % pool, run.length)
        _rows(total, run.first, run.length)[:, :, :, : width * pool].add_(part)


def _length(images: Tensor, rows: int, content: Content) -> int:
    """Of so many encoded rows of images."""
    values = images.shape[0] * images.shape[1] * rows * images.shape[3] * images.shape[4]
    return encoded_like(values, content, images.dtype, torch.device("meta")).numel()
