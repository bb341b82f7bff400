"""A run's start, decided by the first rank from files: the --save folder and the checkpoint to load."""

from __future__ import annotations

import os
import platform
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megasnn.checkpoint.folder import ChosenCheckpoint, checkpoints_to_try, choose_checkpoint, list_checkpoints
from megasnn.checkpoint.lock import FolderLock
from megasnn.common.checks import error_context
from megasnn.common.files import CheckpointError, NoCheckpointError
from megasnn.config import CheckpointConfig, PretrainConfig
from megasnn.parallel.agreement import broadcast_result, run_on_all_ranks
from megasnn.parallel_state import ParallelState

_SHARED_FOLDER_TRIES = 30
_SECONDS_BETWEEN_TRIES = 0.1


@dataclass(frozen=True)
class Start:
    """The decision where a run starts, the same on every rank.

    Attributes:
        checkpoint: to load first; None without one.
        restarted: the job continues from its own checkpoints in the --save folder, whatever --load names.
        mark: file in the --save folder that every host must see; empty where nothing is saved.
    """

    checkpoint: ChosenCheckpoint | None = None
    restarted: bool = False
    mark: str = ""
    notices: tuple[str, ...] = ()


@error_context("while deciding where the run starts")
def agree_on_start(
    config: PretrainConfig, state: ParallelState, checkpoint: ChosenCheckpoint | None = None
) -> tuple[Start, FolderLock | None]:
    """Decides the start on the first rank, before anything is built. Collective.

    Args:
        checkpoint: of --load, if it has been chosen already; the first rank's counts.
    Returns:
        the start; the --save folder's lock, on the first rank of a run that saves.
    Raises:
        CheckpointError: on every rank: as `decide_start`, or hosts see different --save folders.
    """
    lock: FolderLock | None = None

    def decide() -> Start:
        nonlocal lock
        start, lock = decide_start(config, checkpoint)
        return start

    # The lock stays on the first rank: it belongs to that process.
    start = broadcast_result(state.world.handle, decide)
    if start.mark:
        try:
            _require_shared(Path(str(config.checkpoint.save)), start.mark, state)
        except Exception:
            if lock is not None:
                lock.release()
            raise
    return start, lock


def decide_start(config: PretrainConfig, checkpoint: ChosenCheckpoint | None) -> tuple[Start, FolderLock | None]:
    """Claims the --save folder, and decides which checkpoint to load.

    Args:
        checkpoint: of --load, if it has been chosen already.
    Returns:
        the start; the --save folder's lock, None where nothing is saved.
    Raises:
        CheckpointError: --load has no such checkpoint; another run saves in the folder, nobody can, or it has
            checkpoints that this run does not continue.
    """
    options = config.checkpoint
    must_load = bool(options.load) and not options.loads_weights and not options.may_begin_anew
    may_be_restarted = bool(options.save and list_checkpoints(options.save))
    # A restarted job has checkpoints in --save and needs none in --load. Any other --load is checked before --save is
    # made, so that a mistyped one leaves nothing behind.
    if must_load and checkpoint is None and not may_be_restarted:
        checkpoints_to_try(Path(str(options.load)), options.ckpt_step)
    if not options.save or config.training.evaluate_only:
        return _start_from_load(options, checkpoint), None
    folder = Path(options.save)
    lock = FolderLock(folder, continues=options.saves_where_it_loads and not options.finetune)
    try:
        if lock.restarted:
            start = Start(choose_checkpoint(folder, None), restarted=True)
        else:
            start = _start_from_load(options, checkpoint)
        # A random name, so that no file from before is taken for it.
        mark = f".shared_{secrets.token_hex()}"
        (folder / mark).touch()
    except Exception:
        lock.release()
        raise
    notices = [lock.notice] if lock.notice else []
    return replace(start, mark=mark, notices=(*notices, *start.notices)), lock


def _start_from_load(options: CheckpointConfig, checkpoint: ChosenCheckpoint | None) -> Start:
    if checkpoint is not None:
        return Start(checkpoint)
    if not options.load or options.loads_weights:
        return Start()
    try:
        return Start(choose_checkpoint(Path(options.load), options.ckpt_step))
    except NoCheckpointError:
        if not options.may_begin_anew:
            raise
    notice = (
        f"WARNING: there is no checkpoint in {options.load}, so training starts from initial weights, with the model "
        "of the flags; where there should be one, stop and check --load"
    )
    return Start(notices=(notice,))


def _require_shared(folder: Path, mark: str, state: ParallelState) -> None:
    """Raises CheckpointError on every rank unless all see the first rank's file. Collective."""

    def see() -> None:
        # A network file system may show a new file late: a host has 3 s.
        for _ in range(_SHARED_FOLDER_TRIES):
            # Listed, not looked up: NFS remembers for seconds that a name was absent.
            with suppress(OSError):
                if mark in os.listdir(folder):
                    return
            time.sleep(_SECONDS_BETWEEN_TRIES)
        raise CheckpointError(f"{platform.node()} (rank {state.rank})")

    title = f"--save {folder} must be one folder that all hosts share; these see another one, or none:"
    try:
        run_on_all_ranks(state.world.handle, see, title)
    finally:
        if state.rank == 0:
            (folder / mark).unlink(missing_ok=True)
