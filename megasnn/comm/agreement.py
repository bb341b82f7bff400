"""Ranks agree because one of them decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megasnn.comm.group import Group

T = TypeVar("T")


def decided_by_first(group: Group, decide: Callable[[], T]) -> T:
    """What `decide` returned on the first rank, which alone calls it. Raises its ValueError on every rank."""
    box: list[tuple[T | None, str | None]] = [(None, None)]
    if group.rank == 0:
        try:
            box[0] = decide(), None
        except ValueError as error:
            box[0] = None, str(error)
    if group.size > 1:
        dist.broadcast_object_list(box, group_src=0, group=group.handle)
    value, refusal = box[0]
    if refusal is not None:
        raise ValueError(refusal)
    return value  # type: ignore[return-value]
