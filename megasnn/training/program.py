"""A training run as a program: the ranks join, an error on one ends all of them, and the exit status tells."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import torch

from megasnn import checkpoint
from megasnn.comm.world import start_process_group
from megasnn.config import PretrainConfig
from megasnn.data_parallel import ReplicaError
from megasnn.engine.arithmetic import prepare_cublas
from megasnn.parallel_state import (
    ParallelState,
    destroy_model_parallel,
    initialize_model_parallel,
)
from megasnn.process.fault import FaultWatch, cause_and_place, in_brief, in_full, placed
from megasnn.process.signals import StopSignals
from megasnn.process.torchrun import tell_torchrun
from megasnn.telemetry.callback import Callback
from megasnn.training.introduction import print_summary
from megasnn.training.loop import TrainingRun

SAVE_FAILED = 3
SAVING_SECONDS = 5.0
"""How long an error of one of several ranks waits for a checkpoint that is being written."""


def run(config: PretrainConfig, callbacks: Sequence[Callback] = ()) -> int:
    """A whole run as a program: the exit status, with the error named on this rank's standard error.

    0: the run has come to its end, or was asked to stop by a signal, and what it should save is saved. 1: an error.
    3: it has come to its end, but the last checkpoint could not be written. 128 and a signal's number: that signal to
    this rank has ended an evaluation that was all there was to do; the other ranks have 1. Mistakes in flags, data and
    checkpoints and replicas that differ are told without a traceback; anything else with it.

    Args:
        config: validated (megasnn.config.validate).
        callbacks: are told what happens.
    """
    try:
        return _train(config, callbacks)
    except Exception as error:
        cause, _ = cause_and_place(error)
        mistake = isinstance(cause, (ValueError, OSError, checkpoint.CheckpointError, ReplicaError))
        tell_torchrun(in_brief(error), in_full(error, with_traceback=False))
        sys.stderr.write(f"[rank {os.environ.get('RANK', '0')}] {in_full(error, with_traceback=not mistake)}\n")
    if torch.distributed.is_initialized():
        # The other ranks may be gone: nothing that waits for them may run any more.
        sys.stdout.flush()
        os._exit(1)
    return 1


def _train(config: PretrainConfig, callbacks: Sequence[Callback]) -> int:
    """A whole run: joins the ranks, then trains, or with --model-summary prints what would be trained.

    Returns:
        the exit status.
    Raises:
        whatever goes wrong on this rank, after the other ranks have been told; see megasnn.process.fault.
    """
    parallel = config.parallel
    stop = StopSignals(int(os.environ.get("RANK", "0")))
    stop.listen()
    prepare_cublas(config.training)
    with placed("while joining the other ranks"):
        device = start_process_group(parallel.backend, parallel.device, parallel.distributed_timeout_minutes)
    with FaultWatch() as watch:
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
                status = _trained(config, state, stop, callbacks, watch)
        except Exception:
            if state.world.size == 1:  # the program may go on, with another run
                destroy_model_parallel()
            raise
        destroy_model_parallel()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return status


def _trained(
    config: PretrainConfig, state: ParallelState, stop: StopSignals, callbacks: Sequence[Callback], watch: FaultWatch
) -> int:
    """Builds, loads, trains, evaluates, saves; the exit status."""
    stage = f"pipeline stage {state.pipeline.rank}"
    watch.place = lambda: f"rank {state.rank}, {stage}"
    with placed(f"on {stage}"):
        run = TrainingRun(config, state, stop, callbacks)

    def step() -> str:
        return f"{stage}, after iteration {run.iteration}"

    watch.place = lambda: run.engine.distributed.executor.place() or f"rank {state.rank}, {step()}"
    with placed(lambda: f"on {step()}"):
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
    return 0 if run.saved else SAVE_FAILED
