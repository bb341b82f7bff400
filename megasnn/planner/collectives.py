"""Seconds that exchanges between ranks take over links: messages in steps, in each of which a rank sends and receives
one (R. Thakur, R. Rabenseifner, W. Gropp, Optimization of Collective Communication Operations in MPICH, 2005)."""

from __future__ import annotations

import math

from megasnn.pipeline.costs import LinkCost


def all_reduce(link: LinkCost, ranks: int, size: float, on_gpu: bool) -> float:
    """A sum of so many bytes that all ranks get: by Gloo in a ring, whose steps grow with the ranks; by NCCL, which
    takes what is faster for a size, in two trees."""
    if ranks == 1:
        return 0.0
    steps = math.ceil(math.log2(ranks)) if on_gpu else ranks - 1
    return 2 * (steps * link.latency + link.per_byte * size * (ranks - 1) / ranks)


def exchange(link: LinkCost, ranks: int, size: float) -> float:
    """Each rank sends each other one so many bytes, in pairs."""
    return (ranks - 1) * (link.latency + link.per_byte * size)
