"""What messages and collectives take over links of a stated latency and bandwidth.

A message of b bytes takes `latency + b * per_byte`, as in `megasnn.pipeline.cost_model.LinkCost`. Collectives are made
of messages in steps, in each of which a rank sends one message and receives one (R. Thakur, R. Rabenseifner, W. Gropp,
Optimization of Collective Communication Operations in MPICH, 2005, which has the formula of each):

- all-gather: a ring; n - 1 steps with the values of one rank each.
- all-reduce: a ring that adds up, then one that gathers; 2 (n - 1) steps with 1/n of the tensor each (P. Patarasuk,
  X. Yuan, Bandwidth Optimal All-reduce Algorithms, 2009).
- all-to-all: directly, in pairs; n - 1 steps that together carry what this rank gives the others, or what it gets,
  whichever is more.
- broadcast: a binomial tree; log2 n steps, rounded up, with the whole tensor.
- barrier: the same number of steps without bytes.

Two links do not slow each other down, and adding up takes no time.
"""

from __future__ import annotations

from dataclasses import dataclass

from megasnn.pipeline.cost_model import LinkCost


@dataclass(frozen=True)
class Links:
    """The ways between ranks, all alike; results are seconds.

    Attributes:
        latency: seconds of a message without bytes. per_byte: seconds that each byte adds.
    """

    latency: float = 0.0
    per_byte: float = 0.0

    def cost(self) -> LinkCost:
        """For the simulator and the planner."""
        return LinkCost(self.latency, self.per_byte)

    def message(self, size: float) -> float:
        return self.latency + size * self.per_byte

    def all_gather(self, ranks: int, of_each: float) -> float:
        """of_each: bytes that each rank gives."""
        return (ranks - 1) * self.message(of_each)

    def all_reduce(self, ranks: int, size: float) -> float:
        return 2 * (ranks - 1) * self.message(size / ranks)

    def all_to_all(self, ranks: int, given: float, taken: float) -> float:
        """given, taken: bytes to and from other ranks."""
        return (ranks - 1) * self.latency + max(given, taken) * self.per_byte

    def broadcast(self, ranks: int, size: float) -> float:
        return _tree_steps(ranks) * self.message(size)

    def barrier(self, ranks: int) -> float:
        return _tree_steps(ranks) * self.latency


def _tree_steps(ranks: int) -> int:
    return (ranks - 1).bit_length()
