"""A training run as a program: the ranks join, an error on one ends all of them, and the exit status tells."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from megasnn import checkpoint
from megasnn.config import PretrainConfig
from megasnn.engine.arithmetic import prepare_cublas
from megasnn.engine.faults import cause_and_place, claim_fault, end_process, in_full, placed, watch_ranks
from megasnn.parallel.agreement import gather
from megasnn.parallel.replica_check import ReplicaError
from megasnn.parallel_state import (
    ParallelState,
    destroy_model_parallel,
    initialize_model_parallel,
    start_process_group,
)
from megasnn.telemetry.callback import Callback
from megasnn.training.introduction import print_summary
from megasnn.training.loop import TrainingRun
from megasnn.training.signals import StopSignals

SAVE_FAILED, DIVERGED, INTERRUPTED = 3, 4, 130
SAVING_SECONDS = 5.0
"""How long an error of one of several ranks waits for a checkpoint that is being written."""


def run(config: PretrainConfig, callbacks: Sequence[Callback] = ()) -> int:
    """A whole run as a program: the exit status, with the error named on standard error, or for torchrun.

    0: the run has come to its end, or was asked to stop by a signal, and what it should save is saved. 1: an error.
    3: it has come to its end, but the last checkpoint could not be written. 4: it has ended early, since too many steps
    in a row were skipped (--max-skipped-steps). 128 and a signal's number: that signal to this rank has ended an
    evaluation that was all there was to do, in which case the other ranks have 1, or Ctrl-C has ended the run before
    its first step. Mistakes in flags, data and checkpoints and replicas that differ are told without a traceback;
    anything else with it.

    Args:
        config: validated (megasnn.config.validate).
        callbacks: are told what happens.
    """
    try:
        return _recorded(config, callbacks) or 0
    except KeyboardInterrupt:
        sys.stderr.write("interrupted while starting\n")
        status = INTERRUPTED
    except Exception as error:
        status = 1
        if "TORCHELASTIC_ERROR_FILE" not in os.environ:  # torchrun prints what `record` has written there
            sys.stderr.write(f"[rank {os.environ.get('RANK', '0')}] {_told(error)}\n")
    if dist.is_initialized() and dist.get_world_size() > 1:
        end_process()
    return status


@record
def _recorded(config: PretrainConfig, callbacks: Sequence[Callback]) -> int:
    """For torchrun: the error of the rank that has failed first. What follows from it on other ranks is not told."""
    try:
        return _train(config, callbacks)
    except Exception as error:
        if not claim_fault(error):
            end_process()
        raise


def _told(error: Exception) -> str:
    cause, _ = cause_and_place(error)
    is_mistake = isinstance(cause, (ValueError, OSError, checkpoint.CheckpointError, ReplicaError))
    return in_full(error, with_traceback=not is_mistake)


def _train(config: PretrainConfig, callbacks: Sequence[Callback]) -> int:
    """A whole run: joins the ranks, then trains, or with --model-summary prints what would be trained.

    Returns:
        the exit status.
    Raises:
        whatever goes wrong on this rank.
    """
    parallel = config.parallel
    prepare_cublas(config.training)
    with placed("while joining the other ranks"):
        device = start_process_group(parallel.backend, parallel.device, parallel.distributed_timeout_minutes)
    stop_watch = watch_ranks()
    with placed("while making the groups of ranks"):
        state = initialize_model_parallel(
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            device,
            parallel.weight_parallel_size,
            parallel.context_parallel_size,
        )
    status = 0
    try:
        if config.logging.model_summary:
            with placed(f"on pipeline stage {state.pipeline.rank}"):
                print_summary(config, state)
        else:
            status = _trained(config, state, callbacks)
        gather(state.world.handle, None)  # an error of another rank at its end still ends all
        stop_watch()
    finally:
        if state.world.size == 1 or sys.exc_info()[0] is None:  # else nothing that waits for other ranks may run
            destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


def _trained(config: PretrainConfig, state: ParallelState, callbacks: Sequence[Callback]) -> int:
    """Builds, loads, trains, evaluates, saves; the exit status."""
    stage, stop = f"pipeline stage {state.pipeline.rank}", StopSignals()
    with placed(f"on {stage}"):
        run = TrainingRun(config, state, stop, callbacks)
    with placed(lambda: f"on {stage}, after iteration {run.iteration}"):
        try:
            run.train()
        except Exception:
            # What is saved in the background may be nearly complete. The other ranks still work on it: they are told
            # after this, and their processes end.
            with suppress(Exception):  # the first error is the one to be told
                run.saves.finish(None if state.world.size == 1 else SAVING_SECONDS)
                if state.world.size == 1:
                    run.close()
            raise
        run.close()
    if config.training.evaluate_only and not run.evaluations.finished:
        return stop.status
    if run.has_diverged:
        return DIVERGED
    return 0 if run.saved else SAVE_FAILED
