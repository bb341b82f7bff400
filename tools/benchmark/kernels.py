"""Forward and backward time of batch norm, optional max pooling and neurons, relative to a copy of the input.

A copy into existing memory is a lower bound for every kernel. Freed memory stays with the process, as in training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from megasnn.commands.flags import name_in
from megasnn.common.memory import keep_free_memory
from megasnn.config.checks import at_least
from megasnn.kernels import BACKENDS, NeuronSpec
from megasnn.kernels.norm_neuron import BatchNorm, NormNeuron, norm_pool_neuron
from tools.benchmark.harness import Case, Column, Figures, ratios, rounds, seconds, summary


@dataclass(frozen=True)
class Kernels(Case):
    """Norm and neuron, a row for each number of channels. All inputs have about the same size."""

    columns: ClassVar[Sequence[Column]] = (
        ("channels", "row", ""),
        ("copy ms", "copy_ms", ".2f"),
        ("forward, copies", "forward_copies", ".2f"),
        ("backward, copies", "backward_copies", ".2f"),
    )

    rounds: int = 20
    """Number of turns of each row."""
    channels: tuple[int, ...] = (48, 96, 192, 384, 768, 1536)
    """Numbers of channels."""
    mebibytes: float = 12
    """Size of the input in float32."""
    time_steps: int = 4
    """Simulated time steps."""
    samples: int = 8
    """Samples in the input."""
    pool: bool = False
    """Max pooling between norm and neurons."""
    neuron_backend: Annotated[str, name_in(BACKENDS)] = "auto"
    """Kernels to measure."""
    threads: int = 1
    """Threads of a kernel."""

    def problems(self) -> list[str]:
        wrong = at_least(self, 1, "time_steps", "samples", "threads", "rounds")
        wrong += [f"--channels {number} must be at least 1" for number in self.channels if number < 1]
        if not wrong and self.side(max(self.channels)) < 2:
            wrong.append(f"--mebibytes {self.mebibytes} is too small for 2 x 2 pixels of {max(self.channels)} channels")
        return wrong

    def side(self, channels: int) -> int:
        """Height and width of an input of --mebibytes."""
        return math.isqrt(int(self.mebibytes * 2**20) // (4 * self.time_steps * self.samples * channels))

    def measure(self) -> list[Figures]:
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        keep_free_memory()
        try:
            rows = [_Row(self, channels) for channels in self.channels]
            for number in rounds(self.rounds, untimed=2):
                for row in rows:
                    times = row.turn()
                    if number > 0:
                        row.times.append(times)
            return [row.figures() for row in rows]
        finally:
            torch.set_num_threads(before)


class _Row:
    """Tensors of one row, and seconds of copy, forward and backward in each of its rounds."""

    def __init__(self, case: Kernels, channels: int) -> None:
        self._case = case
        self._channels = channels
        side = case.side(channels)
        shape = (case.time_steps, case.samples, side, side, channels)
        self._x = torch.randn(shape).movedim(-1, 2).requires_grad_()
        self._weight = torch.ones(channels, requires_grad=True)
        self._bias = torch.full((channels,), 0.5, requires_grad=True)
        self._copied = torch.empty_like(self._x, requires_grad=False)
        self._g = torch.randn_like(self._spikes())
        self.times: list[tuple[float, float, float]] = []

    def turn(self) -> tuple[float, float, float]:
        copy = seconds(lambda: self._copied.copy_(self._x.detach()))
        spikes: list[Tensor] = []
        forward = seconds(lambda: spikes.append(self._spikes()))
        inputs = [self._x, self._weight, self._bias]
        backward = seconds(lambda: torch.autograd.grad(spikes, inputs, self._g))
        return copy, forward, backward

    def figures(self) -> Figures:
        copy, forward, backward = zip(*self.times, strict=True)
        return {
            "row": f"{self._channels} channels",
            "copy_ms": summary([1e3 * each for each in copy]),
            "forward_copies": ratios(forward, copy),
            "backward_copies": ratios(backward, copy),
        }

    def _spikes(self) -> Tensor:
        case = self._case
        norm_neuron = NormNeuron(NeuronSpec(), 1e-5, case.pool, len(self._x))
        norm = BatchNorm(self._weight, self._bias)
        return norm_pool_neuron(self._x, norm, norm_neuron, backend=case.neuron_backend).spikes
