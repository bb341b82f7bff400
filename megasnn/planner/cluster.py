"""The devices that a plan is for, and how they are connected."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megasnn.grid import AXES, Axis, Grid
from megasnn.pipeline.cost_model import LinkCost
from megasnn.planner.layout import Layout
from megasnn.planner.machines import Machine


@dataclass(frozen=True)
class Cluster:
    """
    Attributes:
        ranks: devices that there are. ranks_of_node: of them on one node.
        machine: what each of them is, with the bytes that it may need.
        spread: by how much the speed of ranks differs, as a standard deviation; everybody waits for the slowest.
    """

    ranks: int
    ranks_of_node: int
    machine: Machine
    spread: float = 0.0

    def counts(self) -> list[int]:
        """Numbers of devices that are looked at."""
        return counts(self.ranks, self.ranks_of_node)

    def link(self, layout: Layout, axis: Axis) -> LinkCost:
        """Between the ranks along an axis; across nodes where they are not all of one."""
        within = is_within_node(layout.grid, axis, self.ranks_of_node)
        return self.machine.within if within else self.machine.between

    def sums_in_memory(self, layout: Layout) -> bool:
        """Whether copies sum up whole gradients in memory that they share: on one node, where neither weights nor the
        optimizer's rows are parted."""
        parted = layout.grid.weight > 1 or layout.shards_optimizer
        return self.machine.summed > 0 and not parted and is_within_node(layout.grid, "data", self.ranks_of_node)

    def slowest(self, ranks: int) -> float:
        """How much longer the slowest of so many ranks takes than the mean of them."""
        return 1 + self.spread * math.sqrt(2 * math.log(ranks)) if ranks > 1 else 1.0


def counts(ranks: int, ranks_of_node: int) -> list[int]:
    """Numbers of devices that are looked at: powers of two, of devices and of whole nodes, and all that there are.

    torchrun starts as many ranks on each node: what is more than one node is whole nodes.
    """
    powers = [1 << power for power in range(ranks.bit_length())]
    found = {*powers, *(ranks_of_node * power for power in powers), ranks}
    whole = (each for each in found if each <= ranks_of_node or each % ranks_of_node == 0)
    return sorted(each for each in whole if each <= ranks)


def is_within_node(grid: Grid, axis: Axis, ranks_of_node: int) -> bool:
    """Whether the ranks along an axis are of one node, where neighbouring ranks are."""
    extent = 1
    for each in reversed(AXES):
        extent *= grid.size(each)
        if each == axis:
            return extent <= ranks_of_node and ranks_of_node % extent == 0
    raise ValueError(f"unknown axis {axis!r}")


def node_problems(ranks: int, ranks_of_node: int) -> list[str]:
    """Devices that are not as many on each node."""
    nodes = ranks // max(ranks_of_node, 1)
    if ranks <= ranks_of_node or ranks == nodes * ranks_of_node:
        return []
    return [
        f"--gpus {ranks} are not whole nodes of --gpus-per-node {ranks_of_node}, and torchrun starts as many ranks on "
        f"each: take --gpus {nodes * ranks_of_node} or {(nodes + 1) * ranks_of_node}, or another --gpus-per-node"
    ]
