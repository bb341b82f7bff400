"""Kernels compile once a host, before the first step, and a dead process keeps nobody waiting."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from numba.core.caching import FunctionCache

import megasnn
from megasnn import ConvNormNeuron, MeanLinear, layer
from megasnn.kernels import NeuronSpec
from megasnn.kernels.norm_neuron_kernels import NeuronUse
from megasnn.kernels.numba import ahead, bispike_loops, coefficients, loops, pool
from megasnn.kernels.numba.jit import kernel, progress, run_kernel
from megasnn.layers.blocks import NeuronConvNorm, neuron_uses
from megasnn.layers.neuron import make_neuron
from megasnn.models.model import Model
from tests.forking import forking

KERNELS = (
    coefficients.fold_slices, coefficients.norm_coefficients, loops.slice_statistics, loops.merge,
    loops.fire_block, loops.block_backward, loops.norm_input_gradient,
    pool.fire_pooled, pool.pooled_backward, bispike_loops.fire_ternary, bispike_loops.back_ternary,
)  # fmt: skip
SECONDS = 30


@dataclass(frozen=True, kw_only=True)
class Pooled(Model):
    """All kernels of neurons: with a norm, with pooling behind it, alone, and ternary."""

    name = "pooled"

    def layers(self):
        yield layer("stem", ConvNormNeuron(self.in_channels, 8, kernel_size=3, max_pool=True))
        yield layer("body", ConvNormNeuron(8, 8, kernel_size=3))
        yield layer("residual", NeuronConvNorm(8, 8, kernel_size=3))
        yield layer("ternary", make_neuron(NeuronSpec("bispike")))
        yield layer("head", MeanLinear(8, self.num_classes))


def test_a_step_compiles_nothing_that_was_not_compiled_ahead() -> None:
    images = torch.rand(4, 3, 8, 8)
    for precision in ("fp32", "fp64"):
        flags = {"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 2, "lr": 0.1, "precision": precision}
        with megasnn.Engine(Pooled(image_size=8, num_classes=3), **flags) as engine:
            before = [list(each.signatures) for each in KERNELS]
            engine.train_step(images, torch.tensor([0, 1, 2, 0]))
            engine.evaluate(images, torch.tensor([0, 1, 2, 0]))
            assert all(before) and [list(each.signatures) for each in KERNELS] == before


def test_neurons_behind_a_norm_are_no_neurons_alone() -> None:
    spec = NeuronSpec()
    pooled = ConvNormNeuron(3, 4, 3, max_pool=True)
    assert neuron_uses([pooled]) == {NeuronUse(spec, has_norm=True, pools=True)}
    assert neuron_uses([ConvNormNeuron(3, 4), NeuronConvNorm(3, 4)]) == {
        NeuronUse(spec, has_norm=True),
        NeuronUse(spec, has_norm=False),
    }


def test_ranks_begin_with_different_kernels_and_take_all() -> None:
    use = NeuronUse(NeuronSpec(), has_norm=True)
    orders = []
    for rank in range(2):
        called = list[str]()
        names = "backward", "statistics", "forward"
        trials = [ahead.Trial(name, use.spec, partial(called.append, name)) for name in names]
        with mock.patch.object(ahead, "trials_of", return_value=iter(trials)):
            ahead.compile_ahead([use], torch.float32, True, rank, ranks=2)
        orders.append(called)
    assert orders == [["statistics", "forward", "backward"], ["backward", "statistics", "forward"]]


def add(x, first, last):
    for i in range(first, last):
        x[i] += 1


def compile_once(folder: str, results: Queue, dies: bool = False) -> None:
    """`add` compiled as a run does it, in a process with a cache of its own."""
    os.environ["NUMBA_CACHE_DIR"] = folder
    before = progress.compiled
    x = np.zeros(3, np.float32)

    def save(*_: object) -> None:
        results.put(-1)
        time.sleep(SECONDS)

    # Numba reads the environment again where it has changed.
    saving = mock.patch.object(FunctionCache, "save_overload", save) if dies else nullcontext()
    with mock.patch("numba.config.CACHE_DIR", folder), saving:
        run_kernel(kernel(add), 3, x)
    results.put(progress.compiled - before)


def test_processes_compile_a_kernel_once_and_the_others_read_it(tmp_path: Path) -> None:
    results = forking().Queue()
    started = [forking().Process(target=compile_once, args=(str(tmp_path), results)) for _ in range(3)]
    for process in started:
        process.start()
    compiled = sorted(results.get(timeout=SECONDS) for _ in started)
    for process in started:
        process.join(SECONDS)
    assert compiled == [0, 0, 1]


def test_a_process_that_dies_while_it_compiles_keeps_nobody_waiting(tmp_path: Path) -> None:
    results = forking().Queue()
    dead = forking().Process(target=compile_once, args=(str(tmp_path), results, True))
    dead.start()
    assert results.get(timeout=SECONDS) == -1  # it holds the lock
    waiting = forking().Process(target=compile_once, args=(str(tmp_path), results))
    waiting.start()
    time.sleep(1.0)
    assert results.empty()
    os.kill(dead.pid or 0, signal.SIGKILL)
    assert results.get(timeout=SECONDS) == 1
    for process in (dead, waiting):
        process.join(SECONDS)


def test_the_first_rank_tells_position_and_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    with mock.patch.multiple(progress, position=2, total=8):
        progress.report()
    monkeypatch.setenv("RANK", "1")
    progress.report()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "kernel 2 of 8" in lines[0] and lines[0].endswith("s so far")
