"""What the hosts of a run must have in common: one folder to save in, the same versions, and clocks that agree."""

from __future__ import annotations

import platform
import secrets
import time
from pathlib import Path

import torch

from megasnn import checkpoint
from megasnn.parallel.agreement import gather, run_on_all_ranks
from megasnn.parallel_state import ParallelState
from megasnn.version import __version__

CLOCK_SECONDS = 5.0  # torchrun's rendezvous takes a host for lost when its clock is 15 seconds behind another's


def require_shared(folder: Path, state: ParallelState) -> None:
    """Raises CheckpointError on every rank where a rank sees another folder by this name than the first. Collective."""
    group = state.world.handle
    mark = checkpoint.broadcast_result(group, lambda: leave_mark(folder))

    def see() -> None:
        if not sees_mark(mark):
            raise checkpoint.CheckpointError(f"{platform.node()} (rank {state.rank})")

    try:
        run_on_all_ranks(
            group, see, f"--save {folder} must be one folder that all hosts share; these see another one, or none:"
        )
    finally:
        if state.rank == 0:
            mark.unlink(missing_ok=True)


def leave_mark(folder: Path) -> Path:
    """Creates an empty file by a new name, by which other hosts find out that they see the same folder."""
    mark = folder / f".shared_{secrets.token_hex(8)}"
    mark.touch(exist_ok=False)
    return mark


def sees_mark(mark: Path) -> bool:
    """True when this process sees the folder in which the mark was left.

    A file server refuses to create a file that is there, whatever a host remembers of the folder; looking for it could
    find an old state of the folder for a minute. A file created elsewhere is removed.
    """
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return True
    except OSError:
        return False
    mark.unlink()
    return False


def host_notice(state: ParallelState) -> str:
    """Warns of hosts with other versions or another time, a line for each; "" where all agree. Collective."""
    group, name = state.world.handle, platform.node()
    versions = gather(group, (name, f"megasnn {__version__}, torch {torch.__version__}"))
    clocks = gather(group, (name, time.time()))  # all ranks look at the clock when the exchange before has ended
    return "\n".join(filter(None, (_other_versions(dict(versions)), _other_clocks(dict(clocks)))))


def _other_versions(versions: dict[str, str]) -> str:
    if len(set(versions.values())) == 1:
        return ""
    return f"WARNING: hosts run different versions: {'; '.join(f'{host}: {text}' for host, text in versions.items())}"


def _other_clocks(clocks: dict[str, float]) -> str:
    first, last = min(clocks, key=clocks.__getitem__), max(clocks, key=clocks.__getitem__)
    apart = clocks[last] - clocks[first]
    if apart < CLOCK_SECONDS:
        return ""
    return (
        f"WARNING: the clock of {last} is {apart:.0f} s ahead of that of {first}: torchrun may lose hosts, or not end, "
        "where clocks differ by more than 15 s; set them by a time server"
    )
