"""A run as a program: ranks join, an error on one ends all; errors and results set the exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

from megasnn.checkpoint.folder import ChosenCheckpoint
from megasnn.common.checks import error_context
from megasnn.common.files import CheckpointError, MissingPackageError
from megasnn.common.launcher import report_to_torchrun, torchrun_reports
from megasnn.config import PretrainConfig
from megasnn.config.data import NO_DATASETS, GivenDatasets
from megasnn.parallel.agreement import gather
from megasnn.parallel.faults import claim_fault, end_process, in_full
from megasnn.parallel.process_group import join_ranks
from megasnn.parallel.replica_check import ReplicaError
from megasnn.telemetry.callback import Callback
from megasnn.training.loop import TrainingRun
from megasnn.training.signals import StopSignals

SAVE_FAILED = 3
DIVERGED = 4
INTERRUPTED = 130
SAVING_SECONDS = 5.0
"""After an error on one of several ranks: longest wait for a save in progress."""
MISTAKES = (ValueError, OSError, CheckpointError, MissingPackageError, ReplicaError)
"""Errors of flags, data and files. Their message says what to change: no traceback is shown."""


def run(
    config: PretrainConfig,
    callbacks: Sequence[Callback] = (),
    checkpoint: ChosenCheckpoint | None = None,
    given: GivenDatasets = NO_DATASETS,
) -> int:
    """Runs a whole training; errors go to standard error, or to torchrun.

    Returns:
        the exit status:
        0: the run has ended, or a signal has stopped it, and its last checkpoint is saved.
        1: an error.
        3: the run has ended, but the last checkpoint could not be written.
        4: too many steps in a row were skipped (--max-skipped-steps).
        128 + a signal's number: the signal has ended an evaluation on this rank, with nothing else to do (other ranks
        return 1); or Ctrl-C has ended the run before its first step.

    Args:
        config: validated (megasnn.config.validate).
        checkpoint: of --load, if it has been chosen already. The first rank's counts.
        given: data sets in Python, in place of the shards of the flags.
    """
    try:
        status = _join_and_run(config, callbacks, checkpoint, given)
        # torch types `record`'s result as optional: None stands for an exit with status 0.
        return 0 if status is None else status
    except KeyboardInterrupt:
        sys.stderr.write("interrupted while starting\n")
        status = INTERRUPTED
    except Exception as error:
        status = 1
        # torchrun prints the error that `_ErrorFile` has written.
        if not torchrun_reports():
            text = in_full(error, with_traceback=not isinstance(error, MISTAKES))
            sys.stderr.write(f"[rank {os.environ.get('RANK', '0')}] {text}\n")
    if dist.is_initialized() and dist.get_world_size() > 1:
        end_process()
    return status


class _ErrorFile(ErrorHandler):
    """This rank's error for torchrun: a mistake as one sentence, any other error with its traceback."""

    def record_exception(self, e: BaseException) -> None:
        if isinstance(e, MISTAKES) and torchrun_reports():
            report_to_torchrun(in_full(e, with_traceback=False))
        else:
            super().record_exception(e)


def _reports_first_error(function: Callable[..., int]) -> Callable[..., int | None]:
    """Reports the ranks' first error to torchrun, which shows one; ends this process at a later error.

    Later errors are mostly broken connections to the first rank.
    """

    @wraps(function)
    def guarded(*arguments: Any) -> int:
        try:
            return function(*arguments)
        except Exception as error:
            if not claim_fault(error):
                end_process()
            raise

    return record(guarded, _ErrorFile())


@_reports_first_error
def _join_and_run(
    config: PretrainConfig,
    callbacks: Sequence[Callback],
    checkpoint: ChosenCheckpoint | None,
    given: GivenDatasets,
) -> int:
    """Joins, builds, loads, trains, evaluates, saves; returns the exit status of a run without an error."""
    state, leave = join_ranks(config)
    stage = f"pipeline stage {state.pp.rank}"
    is_alone = state.world.size == 1
    stop = StopSignals()
    handlers = ExitStack()
    try:
        with error_context(f"on {stage}"):
            run = TrainingRun(config, state, stop, callbacks, checkpoint, given)
        # Only now: before the first step there is nothing to save, and a signal ends the start at once.
        handlers.enter_context(stop)
        with error_context(lambda: f"on {stage}, after iteration {run.engine.iteration}"):
            try:
                run.train()
            except Exception:
                # A save in the background may be nearly complete. The other ranks still work on it: they learn of the
                # error after this, and their processes end.
                with suppress(Exception):
                    # The first error is the one to report.
                    run.saves.finish(None if is_alone else SAVING_SECONDS)
                    if is_alone:
                        run.close()
                raise
            run.close()
        # An error of another rank at its end still ends all.
        gather(state.world.handle, None)
    finally:
        # After an error, nothing that waits for other ranks may run: they are at another place, or gone.
        if is_alone or sys.exc_info()[0] is None:
            leave()
        # Not before the ranks have left: a rank lost to a signal would break the others' leaving.
        handlers.close()
    if config.training.evaluate_only and not run.has_evaluated:
        return stop.status
    if run.has_diverged:
        return DIVERGED
    return 0 if run.saves_succeeded else SAVE_FAILED
