"""A training run as a program: the ranks join, an error on one ends all of them, and the exit status tells."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from megasnn.common.checks import error_context
from megasnn.common.files import CheckpointError
from megasnn.config import PretrainConfig
from megasnn.parallel.agreement import gather
from megasnn.parallel.faults import claim_fault, end_process, in_full
from megasnn.parallel.process_group import join_ranks
from megasnn.parallel.replica_check import ReplicaError
from megasnn.telemetry.callback import Callback
from megasnn.training.loop import StopSignals, TrainingRun

SAVE_FAILED, DIVERGED, INTERRUPTED = 3, 4, 130
SAVING_SECONDS = 5.0
"""How long an error of one of several ranks waits for a checkpoint that is being written."""
MISTAKES = ValueError, OSError, CheckpointError, ReplicaError
"""Errors of flags, data and files, whose message says what to change: reported without a traceback."""


def run(config: PretrainConfig, callbacks: Sequence[Callback] = ()) -> int:
    """Runs a whole training as a program, and returns the exit status; errors go to standard error, or to torchrun.

    0: the run has come to its end, or was asked to stop by a signal, and what it should save is saved. 1: an error.
    3: it has come to its end, but the last checkpoint could not be written. 4: it has ended early, since too many steps
    in a row were skipped (--max-skipped-steps). 128 and a signal's number: that signal to this rank has ended an
    evaluation that was all there was to do, in which case the other ranks have 1, or Ctrl-C has ended the run before
    its first step. Mistakes in flags, data and checkpoints and replicas that differ are reported without a traceback.

    Args:
        config: validated (megasnn.config.validate).
        callbacks: are called with what happens.
    """
    try:
        return _recorded(config, callbacks) or 0
    except KeyboardInterrupt:
        sys.stderr.write("interrupted while starting\n")
        status = INTERRUPTED
    except Exception as error:
        status = 1
        if "TORCHELASTIC_ERROR_FILE" not in os.environ:  # torchrun prints what `record` has written there
            text = in_full(error, with_traceback=not isinstance(error, MISTAKES))
            sys.stderr.write(f"[rank {os.environ.get('RANK', '0')}] {text}\n")
    if dist.is_initialized() and dist.get_world_size() > 1:
        end_process()
    return status


@record
def _recorded(config: PretrainConfig, callbacks: Sequence[Callback]) -> int:
    """Leaves torchrun the error of the rank that has failed first. Errors that follow from it are not reported."""
    try:
        return _train(config, callbacks)
    except Exception as error:
        if not claim_fault(error):
            end_process()
        if isinstance(error, MISTAKES):
            raise error.with_traceback(None) from None  # `record` writes down the traceback
        raise


def _train(config: PretrainConfig, callbacks: Sequence[Callback]) -> int:
    """Joins the ranks, builds, loads, trains, evaluates, saves; returns the exit status."""
    state, leave = join_ranks(config)
    stage, stop, is_alone = f"pipeline stage {state.pp.rank}", StopSignals(), state.world.size == 1
    handled = ExitStack()
    try:
        with error_context(f"on {stage}"):
            run = TrainingRun(config, state, stop, callbacks)
        handled.enter_context(stop)  # until the ranks have left each other: a rank that is gone would break their end
        with error_context(lambda: f"on {stage}, after iteration {run.engine.iteration}"):
            try:
                run.train()
            except Exception:
                # A save in the background may be nearly complete. The other ranks still work on it: they hear of the
                # error after this, and their processes end.
                with suppress(Exception):  # the first error is the one to be reported
                    run.saves.finish(None if is_alone else SAVING_SECONDS)
                    if is_alone:
                        run.close()
                raise
            run.close()
        gather(state.world.handle, None)  # an error of another rank at its end still ends all
    finally:
        if is_alone or sys.exc_info()[0] is None:  # else nothing that waits for other ranks may run
            leave()
        handled.close()
    if config.training.evaluate_only and not run.has_evaluated:
        return stop.status
    if run.has_diverged:
        return DIVERGED
    return 0 if run.saved else SAVE_FAILED
