"""The pretraining program with a fault put into one of its ranks.

    torchrun ... tests/faults/driver.py FAULT RANK [flags of pretrain_spikformer.py]

Faults happen in the forward of the last micro-batch of the second step, unless their function says otherwise.
"""

from __future__ import annotations

import errno
import inspect
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pretrain_spikformer
from megasnn.checkpoint import save
from megasnn.data import RankBatch
from megasnn.engine import Engine
from megasnn.layers.weight_grad import WeightGradients
from megasnn.parallel import process_group
from megasnn.pipeline.chunk import PipelineChunk
from megasnn.telemetry.records import StepResult
from megasnn.telemetry.timers import Timers
from megasnn.training.loop import TrainingRun
from tests.sums import form_sums_where_few

MICRO_BATCHES = 2  # of a step, on every rank
PID_FILE = "MEGASNN_TEST_PID_FILE"


def _in_second_step(act: Callable[[], None]) -> None:
    """Acts in a chunk's forward of the last micro-batch."""
    forward, calls = PipelineChunk.forward, Counter[PipelineChunk]()

    def counted(self: PipelineChunk, *arguments: Any, **options: Any) -> Any:
        number = inspect.signature(forward).bind(self, *arguments, **options).arguments.get("micro_batch")
        if number == MICRO_BATCHES - 1:
            calls[self] += 1
            if calls[self] == 2:
                act()
        return forward(self, *arguments, **options)

    mock.patch.object(PipelineChunk, "forward", counted).start()


def _fail() -> None:
    raise RuntimeError("injected fault")


def raise_in_step() -> None:
    _in_second_step(_fail)


def raise_in_weight_gradient() -> None:
    """In the first one of the second step."""
    step = Engine.train_on

    def broken(self: Engine, batch: RankBatch) -> StepResult:
        if self.iteration == 1:
            mock.patch.object(WeightGradients, "_add", side_effect=RuntimeError("injected fault")).start()
        return step(self, batch)

    mock.patch.object(Engine, "train_on", broken).start()


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

    mock.patch.object(Timers, "mean_ms", asked).start()
    for name in ("synchronize", "empty_cache", "memory_stats", "current_stream"):
        mock.patch.object(torch.cuda, name, asked).start()
    Path(os.environ[PID_FILE]).with_suffix(".lost").write_text(str(time.monotonic()))
    _LostGpu().__enter__()
    raise torch.AcceleratorError(LOST)


def lose_the_gpu() -> None:
    """As torch tells of a kernel's error, at the first thing that asks the GPU for something."""
    _in_second_step(_lose_the_gpu)


def slow_evaluation() -> None:
    """Each forward without gradients takes a while. Writes down the process id in the third one."""
    forward, calls = PipelineChunk.forward, count()

    def slowed(self: PipelineChunk, *arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            if next(calls) == 2:
                _write_down_pid()
            time.sleep(0.2)
        return forward(self, *arguments, **options)

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

    _in_second_step(stall)


def raise_while_saving() -> None:
    """While this rank still writes its part of the first checkpoint, in the background."""
    write = save.write_safetensors

    def slowly(*arguments: Any) -> Any:
        time.sleep(2.5)
        return write(*arguments)

    mock.patch.object(save, "write_safetensors", slowly).start()
    raise_in_step()


def stall_the_first_time() -> None:
    """Not after torchrun has started all ranks anew."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        stall_in_step()


def full_disk() -> None:
    """From the second save on."""
    write, calls = save.write_safetensors, count()

    def limited(*arguments: Any) -> Any:
        results = write(*arguments)
        if next(calls):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return results

    mock.patch.object(save, "write_safetensors", limited).start()


def slow_end() -> None:
    """What there is to do after the last step takes a while. Writes down the process id in it."""
    close = TrainingRun.close

    def slowly(self: TrainingRun) -> None:
        _write_down_pid()
        time.sleep(0.7)
        close(self)

    mock.patch.object(TrainingRun, "close", slowly).start()


def disk_of_its_own() -> None:
    """A relative path leads this rank elsewhere."""
    os.chdir(Path(os.environ[PID_FILE]).parent)


def leave_before_joining() -> None:
    """As a rank does whose program does not even start."""
    mock.patch.object(process_group, "start_process_group", side_effect=SystemExit(0)).start()


def main(fault: str, faulty_rank: str, *argv: str) -> int:
    form_sums_where_few()  # its results are compared with those of the tests' own processes
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":  # hosts, which are torchruns of this machine
        mock.patch.object(socket, "gethostname", lambda: f"host{os.environ['GROUP_RANK']}").start()
    if os.environ.get("RANK", "0") == faulty_rank:
        globals()[fault]()
    return pretrain_spikformer.main(list(argv))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
