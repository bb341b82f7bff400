"""Time of batch norm, optional max pooling and neurons as one unit, in copies of its input, forward and backward.

A copy, into memory that is there already, is what no kernel can go below. Rows take turns, and so do forward, backward
and copy within a row, so that a machine whose speed drifts slows all of them. Freed memory is kept, as in training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from megasnn.config.checks import at_least
from megasnn.config.fields import name_in
from megasnn.free_memory import keep_free_memory
from megasnn.kernels import BACKENDS, NeuronSpec
from megasnn.kernels.unit import norm_pool_neuron
from tools.benchmark.harness import Case, Figures, Flags, Part, ratios, rounds, seconds, summary
from tools.benchmark.log import Line
from tools.benchmark.table import change, quartiles, table

HEADINGS = ("", "copy, ms", "forward,\ncopies", "quartiles", "backward,\ncopies", "quartiles", "change", "change")


@dataclass(frozen=True)
class KernelBenchmark(Flags):
    """A row for each number of channels; all inputs are about as large."""

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
    rounds: int = 20
    """How often each row has its turn; two untimed turns come before."""

    def problems(self) -> list[str]:
        wrong = at_least(self, 1, "time_steps", "samples", "threads", "rounds")
        wrong += [f"--channels {number} must be at least 1" for number in self.channels if number < 1]
        if not wrong and self.side(max(self.channels)) < 2:
            wrong.append(
                f"--mebibytes {self.mebibytes} are less than 2 x 2 pixels of --channels {max(self.channels)} at "
                f"--time-steps {self.time_steps} of --samples {self.samples}"
            )
        return wrong

    def side(self, channels: int) -> int:
        """Height and width."""
        return math.isqrt(int(self.mebibytes * 2**20) // (4 * self.time_steps * self.samples * channels))


class _Row:
    """Tensors of one row, and the seconds that each of its rounds took."""

    def __init__(self, flags: KernelBenchmark, channels: int) -> None:
        self.channels, self._flags, side = channels, flags, flags.side(channels)
        shape = flags.time_steps, flags.samples, side, side, channels
        self.x = torch.randn(shape).movedim(-1, 2).requires_grad_()
        self._parameters = torch.ones(channels, requires_grad=True), torch.full((channels,), 0.5, requires_grad=True)
        self._g, self._copied = torch.randn_like(self._spikes()), torch.empty_like(self.x, requires_grad=False)
        self.copy: list[float] = []
        self.forward: list[float] = []
        self.backward: list[float] = []

    def turn(self) -> None:
        self.copy.append(seconds(lambda: self._copied.copy_(self.x.detach())))
        kept: list[Tensor] = []
        self.forward.append(seconds(lambda: kept.append(self._spikes())))
        self.backward.append(seconds(lambda: torch.autograd.grad(kept, [self.x, *self._parameters], self._g)))

    def _spikes(self) -> Tensor:
        pool, backend = self._flags.pool, self._flags.neuron_backend
        spikes, *_ = norm_pool_neuron(
            self.x, *self._parameters, spec=NeuronSpec(), training=True, pool=pool, backend=backend
        )
        return spikes


def measure(flags: KernelBenchmark) -> Iterator[Part]:
    before = torch.get_num_threads()
    torch.set_num_threads(flags.threads)
    keep_free_memory()
    try:
        rows = [_Row(flags, channels) for channels in flags.channels]
        for turn in rounds(flags.rounds, untimed=2):
            for row in rows:
                row.turn()
                if turn < 1:
                    row.copy, row.forward, row.backward = [], [], []
        yield Part([_figures(flags, row) for row in rows])
    finally:
        torch.set_num_threads(before)


def _figures(flags: KernelBenchmark, row: _Row) -> Figures:
    names = ("mebibytes", "time_steps", "samples", "pool", "neuron_backend", "threads")
    return {
        "row": f"{row.channels} channels",
        "configuration": {"channels": row.channels, **{name: getattr(flags, name) for name in names}},
        "copy_ms": summary([1000 * each for each in row.copy]),
        "forward_copies": ratios(row.forward, row.copy),
        "backward_copies": ratios(row.backward, row.copy),
    }


def report(flags: KernelBenchmark, lines: Sequence[Line], earlier: Sequence[Line | None]) -> str:
    machine, pool = lines[0]["machine"], ", max pooling" if flags.pool else ""
    return (
        f"batch norm{pool} and LIF on {flags.mebibytes} MiB, T {flags.time_steps}, {flags.neuron_backend} kernels; "
        f"{machine['cpu']}, {flags.threads} threads\n\n{table(HEADINGS, list(map(_cells, lines, earlier)))}"
    )


def _cells(line: Line, last: Line | None) -> list[str]:
    cells = [line["row"], f"{line['copy_ms']['median']:.2f}"]
    for figure in (line["forward_copies"], line["backward_copies"]):
        cells += [f"{figure['median']:.2f}", quartiles(figure, ".2f")]
    return [*cells, *(change(line, last, name, "median") for name in ("forward_copies", "backward_copies"))]


KERNELS = Case(KernelBenchmark, measure, report, "change: of forward and backward, against the latest run alike.")
