"""A run's start, decided by the first rank from files: the --save folder and the checkpoint to load."""

from __future__ import annotations

import os
import platform
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megasnn.checkpoint.folder import ChosenCheckpoint, choose_checkpoint, list_checkpoints, resolve
from megasnn.checkpoint.lock import FolderLock
from megasnn.common.checks import error_context
from megasnn.common.files import CheckpointError, NoCheckpointError
from megasnn.config import PretrainConfig
from megasnn.parallel.agreement import broadcast_result, run_on_all_ranks
from megasnn.parallel_state import ParallelState

_SHARED_FOLDER_TRIES = 30
_SECONDS_BETWEEN_TRIES = 0.1


@dataclass(frozen=True)
class Start:
    """The same on every rank.

    Attributes:
        checkpoint: to load first; None without one.
        is_restarted_job: the job continues from its own checkpoints in the --save folder, whatever --load names.
        mark: file in the --save folder that every host must see; empty where nothing is saved.
        notices: for the user.
    """

    checkpoint: ChosenCheckpoint | None = None
    is_restarted_job: bool = False
    mark: str = ""
    notices: tuple[str, ...] = ()


@error_context("while deciding where the run starts")
def agree_on_start(config: PretrainConfig, state: ParallelState) -> tuple[Start, FolderLock | None]:
    """Decides the start on the first rank, before anything is built. Collective.

    Returns:
        the start; the --save folder's lock, on the first rank of a run that saves.
    Raises:
        CheckpointError: on every rank: as `decide_start`, or hosts see different --save folders.
    """
    lock: FolderLock | None = None

    def decide() -> Start:
        nonlocal lock
        start, lock = decide_start(config)
        return start

    start = broadcast_result(state.world.handle, decide)
    if start.mark:
        try:
            _require_shared(Path(str(config.checkpoint.save)), start.mark, state)
        except Exception:
            if lock is not None:
                lock.release()
            raise
    return start, lock


def decide_start(config: PretrainConfig) -> tuple[Start, FolderLock | None]:
    """Claims the --save folder, and chooses the checkpoint to load.

    Returns:
        the start; the --save folder's lock, None where nothing is saved.
    Raises:
        CheckpointError: --load has no such checkpoint; another run saves in the folder, nobody can, or it has
            checkpoints that this run does not continue.
    """
    options = config.checkpoint
    loads = bool(options.load) and not options.loads_weights
    # A restarted job has checkpoints in --save and needs none in --load. Any other --load is checked before --save is
    # made, so that a mistyped one leaves nothing behind.
    if loads and not options.may_begin_anew and not (options.save and list_checkpoints(options.save)):
        resolve(Path(str(options.load)), options.ckpt_step)
    if not options.save or config.training.evaluate_only:
        return _choose(config, is_restarted_job=False), None
    folder = Path(options.save)
    lock = FolderLock(folder, loads_from_folder=options.saves_where_it_loads and not options.finetune)
    try:
        start = _choose(config, lock.is_restarted_job)
        mark = f".shared_{secrets.token_hex()}"
        # A random name, so that no file from before is taken for it.
        (folder / mark).touch()
    except Exception:
        lock.release()
        raise
    notices = [lock.notice] if lock.notice else []
    return Start(start.checkpoint, start.is_restarted_job, mark, (*notices, *start.notices)), lock


def _choose(config: PretrainConfig, is_restarted_job: bool) -> Start:
    options = config.checkpoint
    if is_restarted_job:
        return Start(choose_checkpoint(Path(str(options.save)), None), is_restarted_job)
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
