"""How far the clocks of ranks are apart, so that what they did can be drawn on one axis."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megasnn.parallel.group import Group

EXCHANGES = 5
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""On Linux another one for each start of a host, from which its clock counts."""


def clock_offsets(group: Group) -> list[float]:
    """Seconds to add to each rank's `time.perf_counter()` for that of the group's first rank. Collective.

    Processes of one host read the same clock. Elsewhere the first rank asks for the time, and takes the answer of the
    quickest exchange as read in the middle of it (Cristian, Distributed Computing 3, 1989). The messages are the hosts'
    own: a GPU's would be on the way when the host has long gone on.
    """
    if group.size == 1:
        return [0.0]
    hosts: list[str] = [""] * group.size
    dist.all_gather_object(hosts, _host(), group=group.handle)
    offsets = torch.zeros(group.size, dtype=torch.float64)
    for rank in range(1, group.size):
        if hosts[rank] == hosts[0]:
            continue
        if group.rank == 0:
            offsets[rank] = min(_ask(group, rank) for _ in range(EXCHANGES))[1]
        elif group.rank == rank:
            for _ in range(EXCHANGES):
                _answer(group)
    dist.broadcast(offsets, group_src=0, group=group.handle)
    return offsets.tolist()


def _host() -> str:
    """What tells hosts apart: by their names alone, containers of several may be called the same."""
    start = BOOT_ID.read_text() if BOOT_ID.is_file() else ""
    return f"{socket.gethostname()} {start}"


def _ask(group: Group, rank: int) -> tuple[float, float]:
    """(seconds of the exchange, seconds to add to the other's clock)."""
    theirs = torch.zeros(1, dtype=torch.float64)
    sent = time.perf_counter()
    dist.send(theirs, group.ranks[rank], group=group.handle)
    dist.recv(theirs, group.ranks[rank], group=group.handle)
    received = time.perf_counter()
    return received - sent, (sent + received) / 2 - theirs.item()


def _answer(group: Group) -> None:
    question = torch.zeros(1, dtype=torch.float64)
    dist.recv(question, group.ranks[0], group=group.handle)
    dist.send(torch.full_like(question, time.perf_counter()), group.ranks[0], group=group.handle)
