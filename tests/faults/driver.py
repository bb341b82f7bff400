"""The pretraining program with a fault put into one of its ranks.

    torchrun ... tests/faults/driver.py FAULT RANK [flags of pretrain_spikformer.py]

Faults happen at the second forward of the second step, unless their function says otherwise.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pretrain_spikformer
from megasnn.checkpoint import save
from megasnn.checkpoint.writer import Writer
from megasnn.data import GlobalBatch
from megasnn.engine import Engine
from megasnn.engine import mesh as program
from megasnn.kernels.layout import flat_in_memory
from megasnn.parallel.replica_check import ReplicaCheck
from megasnn.pipeline.chunk import PipelineChunk
from megasnn.pipeline.executor import PipelineExecutor
from megasnn.schedule import Action
from megasnn.telemetry.records import StepResult
from megasnn.telemetry.timers import DeviceClock
from tests.sums import form_sums_where_few

MICRO_BATCHES = 2  # of a step, on every rank
PID_FILE = "MEGASNN_TEST_PID_FILE"


def _at_second_forward_of_second_step(act: Callable[[], None]) -> None:
    forward, calls = PipelineChunk.forward, iter(range(1_000))

    def counted(self: PipelineChunk, *arguments: Any) -> Any:
        if next(calls) == MICRO_BATCHES + 1:
            act()
        return forward(self, *arguments)

    mock.patch.object(PipelineChunk, "forward", counted).start()


def raise_in_step() -> None:
    def fail() -> None:
        raise RuntimeError("injected fault")

    _at_second_forward_of_second_step(fail)


LOST = "CUDA error: an illegal memory access was encountered"
ASKED_AGAIN = "CUDA error: asked for something behind its failure"


class _LostGpu(TorchDispatchMode):
    """Stands for a GPU behind a failure of it: whatever is done with a tensor fails as well."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise torch.AcceleratorError(ASKED_AGAIN)


def _lose_the_gpu() -> None:
    """The GPU of this rank fails, and so does what asks it for anything from then on. Writes down when."""

    def asked(*args: Any, **options: Any) -> Any:
        raise torch.AcceleratorError(ASKED_AGAIN)

    for name in ("mark", "wait", "has_passed"):
        mock.patch.object(DeviceClock, name, asked).start()
    for name in ("synchronize", "empty_cache", "memory_stats", "current_stream"):
        mock.patch.object(torch.cuda, name, asked).start()
    Path(os.environ[PID_FILE]).with_suffix(".lost").write_text(str(time.monotonic()))
    _LostGpu().__enter__()
    raise torch.AcceleratorError(LOST)


def lose_the_gpu() -> None:
    """As torch tells of a kernel's error, at the first thing that asks the GPU for something."""
    _at_second_forward_of_second_step(_lose_the_gpu)


def slow_evaluation() -> None:
    """Each forward without gradients takes a while. Writes down the process id in the third one."""
    forward, calls = PipelineChunk.forward, iter(range(1_000))

    def slowed(self: PipelineChunk, *arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            if next(calls) == 2:
                _write_down_pid()
            time.sleep(0.2)
        return forward(self, *arguments)

    mock.patch.object(PipelineChunk, "forward", slowed).start()


def _write_down_pid() -> None:
    path = Path(os.environ[PID_FILE])
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)


def stall_in_step() -> None:
    """Writes down the process id and does not go on, so that the test can kill it there."""

    def stall() -> None:
        time.sleep(0.5)  # so that the other ranks come to where they wait for this one
        _write_down_pid()
        while True:
            time.sleep(0.1)

    _at_second_forward_of_second_step(stall)


def raise_while_saving() -> None:
    """While this rank still writes its part of the first checkpoint, in the background."""
    write = save.write_safetensors

    def slowly(*arguments: Any) -> Any:
        time.sleep(2.5)
        return write(*arguments)

    mock.patch.object(save, "write_safetensors", slowly).start()
    raise_in_step()


def raise_in_weight_gradient() -> None:
    """In the second step, at the first weight gradient of the last micro-batch."""
    compute, calls = PipelineExecutor._weight_gradient, iter(range(1_000))

    def counted(self: PipelineExecutor, run: Any, action: Action) -> None:
        if next(calls) >= len(self._chunks) * MICRO_BATCHES and action.micro_batch == MICRO_BATCHES - 1:
            raise RuntimeError("injected fault")
        compute(self, run, action)

    mock.patch.object(PipelineExecutor, "_weight_gradient", counted).start()


def slow_rank() -> None:
    """Each of its actions takes longer than all of the others' work."""
    do = PipelineExecutor._do

    def slowed(self: PipelineExecutor, run: Any, action: Action) -> None:
        do(self, run, action)
        time.sleep(0.02)

    mock.patch.object(PipelineExecutor, "_do", slowed).start()


def stall_the_first_time() -> None:
    """Not after torchrun has started all ranks anew."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        stall_in_step()


def full_disk() -> None:
    """From the second save on."""
    _fail_saves(range(1, 1_000))


def disk_of_its_own() -> None:
    """A relative path leads this rank elsewhere."""
    os.chdir(Path(os.environ[PID_FILE]).parent)


def _fail_saves(which: range) -> None:
    calls = iter(range(1_000))

    def limited(write: Callable[..., Any], *arguments: Any) -> Any:
        results = write(*arguments)
        if next(calls) in which:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return results

    mock.patch.object(save, "write_safetensors", partial(limited, save.write_safetensors)).start()


def leave_before_joining() -> None:
    """As a rank does whose program does not even start."""
    mock.patch.object(program, "start_process_group", side_effect=SystemExit(0)).start()


def raise_in_save() -> None:
    """At the first save."""
    mock.patch.object(Writer, "save", side_effect=RuntimeError("injected fault while saving")).start()


def nan_in_the_weights() -> None:
    """Before the third step, in the projection of the first attention."""
    step = Engine.train_on

    def poisoned(self: Engine, batch: GlobalBatch) -> StepResult:
        if self.iteration == 2:
            for entry in self.distributed.tensors:
                if entry.name == "blocks.0.attention.projection.conv.weight":
                    entry.tensor.data.fill_(float("nan"))
        return step(self, batch)

    mock.patch.object(Engine, "train_on", poisoned).start()


def flip_in_a_weight() -> None:
    """Before the comparison of the second iteration: no step has computed with it."""
    compare = ReplicaCheck.__call__

    def flipped(self: ReplicaCheck, iteration: int) -> None:
        if iteration == 2:
            (entry,) = [entry for entry in self._entries() if entry.name == "blocks.0.mlp.fc1.conv.weight"]
            flat_in_memory(entry.tensor).view(torch.int32)[-1] ^= 1
        compare(self, iteration)

    mock.patch.object(ReplicaCheck, "__call__", flipped).start()


FAULTS = {
    function.__name__: function
    for function in (
        raise_in_step,
        raise_while_saving,
        lose_the_gpu,
        slow_evaluation,
        stall_in_step,
        raise_in_weight_gradient,
        slow_rank,
        stall_the_first_time,
        full_disk,
        disk_of_its_own,
        leave_before_joining,
        raise_in_save,
        nan_in_the_weights,
        flip_in_a_weight,
    )
}


def main(fault: str, faulty_rank: str, *argv: str) -> int:
    form_sums_where_few()  # its results are compared with those of the tests' own processes
    if os.environ.get("RANK", "0") == faulty_rank:
        FAULTS[fault]()
    return pretrain_spikformer.main(list(argv))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
