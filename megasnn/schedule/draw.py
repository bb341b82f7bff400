"""A schedule as text: one row per pipeline rank, with the places that a message is about marked."""

from __future__ import annotations

from collections.abc import Collection
from itertools import zip_longest

from megasnn.schedule.actions import Action

Place = tuple[int, int]  # (pipeline rank, index of its action)
AROUND = 6  # actions shown on each side of a mark


def format_actions(orders: Collection[Collection[Action]], marks: Collection[Place] = ()) -> str:
    """The grid of ``torch.distributed.pipelining``'s messages, turned: time runs to the right.

    Args:
        orders: the actions of each rank. marks: places to point out as ``>1B3<``; an index behind the last
        action is its end. With marks, only the
            columns near them are shown.
    """
    if not orders:
        return "no ranks"
    rows = [[*map(str, order), "end"] for order in orders]
    for rank, index in marks:
        rows[rank][index] = f">{rows[rank][index]}<"
    columns = max(len(row) for row in rows)
    first = max(0, min((index for _, index in marks), default=0) - AROUND)
    last = min(columns, max((index for _, index in marks), default=columns) + AROUND + 1)
    labels = [f"rank {rank}:" for rank in range(len(rows))]
    cells = list(zip_longest(*(row[first:last] for row in rows), fillvalue=""))
    if first > 0:
        cells.insert(0, tuple("..." for _ in rows))
    if last < columns:
        cells.append(tuple("..." if len(row) > last else "" for row in rows))
    table = [labels, *cells]
    widths = [max(len(cell) for cell in column) for column in table]
    return "\n".join(
        " ".join(column[rank].ljust(width) for column, width in zip(table, widths, strict=True)).rstrip()
        for rank in range(len(rows))
    )
