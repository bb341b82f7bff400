"""Time of batch norm, optional max pooling and neurons as one unit, in copies of its input, forward and backward.

A copy, into memory that is there already, is what no kernel can go below. Freed memory is kept, as in training.
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
    """Norm and neuron, a row for each number of channels; all inputs are about as large."""

    columns: ClassVar[Sequence[Column]] = (
        ("channels", "row", ""),
        ("copy ms", "copy_ms", ".2f"),
        ("forward, copies", "forward_copies", ".2f"),
        ("backward, copies", "backward_copies", ".2f"),
    )

    rounds: int = 20
    """How often each row has its turn."""
    channels: tuple[int, ...] = (48, 96, 192, 384, 768, 1536)
    """Numbers of channels."""
    mebibytes: float = 12
    """Size of the input in float32."""
    time_steps: int = 4
    """Simulated time steps."""
    samples: int = 8
    """Samples in the input."""
    pool: bool = False
    """With the max pooling between norm and neurons."""
    neuron_backend: Annotated[str, name_in(BACKENDS)] = "auto"
    """What computes them."""
    threads: int = 1
    """Threads that compute."""

    def problems(self) -> list[str]:
        wrong = at_least(self, 1, "time_steps", "samples", "threads", "rounds")
        wrong += [f"--channels {number} must be at least 1" for number in self.channels if number < 1]
        if not wrong and self.side(max(self.channels)) < 2:
            wrong.append(f"--mebibytes {self.mebibytes} are less than 2 x 2 pixels of {max(self.channels)} channels")
        return wrong

    def side(self, channels: int) -> int:
        """Height and width."""
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
        self._case, self._channels, side = case, channels, case.side(channels)
        shape = case.time_steps, case.samples, side, side, channels
        self._x = torch.randn(shape).movedim(-1, 2).requires_grad_()
        self._learned = torch.ones(channels, requires_grad=True), torch.full((channels,), 0.5, requires_grad=True)
        self._g, self._copied = torch.randn_like(self._spikes()), torch.empty_like(self._x, requires_grad=False)
        self.times: list[tuple[float, float, float]] = []

    def turn(self) -> tuple[float, float, float]:
        copy = seconds(lambda: self._copied.copy_(self._x.detach()))
        kept: list[Tensor] = []
        forward = seconds(lambda: kept.append(self._spikes()))
        return copy, forward, seconds(lambda: torch.autograd.grad(kept, [self._x, *self._learned], self._g))

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
        return norm_pool_neuron(self._x, BatchNorm(*self._learned), norm_neuron, backend=case.neuron_backend).spikes
