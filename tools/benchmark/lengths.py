"""Time of causal spiking attention for each token, against the number of tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megasnn.common.memory import keep_free_memory
from megasnn.config.checks import at_least
from megasnn.layers import CausalSpikingAttention
from megasnn.layers.shape_inference import mark_spikes
from tools.benchmark.harness import Case, Column, Figures, rounds


@dataclass(frozen=True)
class Lengths(Case):
    """Spiking attention of one sample on one thread, forward and backward, a row for each number of tokens."""

    columns: ClassVar[Sequence[Column]] = (
        ("tokens", "row", ""),
        ("us a token, fastest", "us_per_token", ".1f"),
        ("beside the first row", "ratio", ".2f"),
    )
    notes: ClassVar[str] = "Processor time. The fastest round counts: other work on the machine only adds time."

    rounds: int = 20
    """Number of turns of each row."""
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    """Numbers of tokens."""
    embed_dim: int = 256
    """Channels."""
    num_heads: int = 8
    """Heads."""
    time_steps: int = 4
    """Simulated time steps."""

    def problems(self) -> list[str]:
        wrong = at_least(self, 1, "rounds", "embed_dim", "num_heads", "time_steps")
        return wrong + [f"--lengths {length} must be at least 1" for length in self.lengths if length < 1]

    def measure(self) -> list[Figures]:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        keep_free_memory()
        try:
            works = [self._work(length) for length in self.lengths]
            fastest = [float("inf")] * len(works)
            for _ in rounds(self.rounds, untimed=1):
                # Lengths in turn: a slow phase of the machine affects all of them.
                for index, work in enumerate(works):
                    fastest[index] = min(fastest[index], _processor_seconds(*work))
        finally:
            torch.set_num_threads(before)
        costs = [1e6 * each / length for each, length in zip(fastest, self.lengths, strict=True)]
        return [
            {"row": str(length), "us_per_token": cost, "ratio": cost / costs[0]}
            for length, cost in zip(self.lengths, costs, strict=True)
        ]

    def _work(self, length: int) -> tuple[CausalSpikingAttention, Tensor]:
        """A layer after its dry run, and spikes of q, k and v of which a fifth fires."""
        attention = CausalSpikingAttention(self.embed_dim, self.num_heads)
        shape = (self.time_steps, 1, length, 3 * self.embed_dim)
        attention(mark_spikes(torch.empty(shape, device="meta").movedim(-1, 2)))
        return attention, (torch.rand(shape) < 0.2).float().movedim(-1, 2).requires_grad_()


def _processor_seconds(attention: CausalSpikingAttention, x: Tensor) -> float:
    begin = time.process_time()
    y = attention(x)
    torch.autograd.grad(y, x, y.detach())
    return time.process_time() - begin
