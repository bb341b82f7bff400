"""Devices to plan for, measured or from the table, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AliasChoices, Field, with_config

from megasnn.common.files import STRICT
from megasnn.common.grid import AXES, Axis, Grid
from megasnn.common.registry import Registry
from megasnn.pipeline.cost_model import LinkCost

GB = 1e9
AUTO_DEVICE = "auto"  # stands for the measured device
MOVED_IN_UPDATE = 7.0  # bytes for each byte of parameters: AdamW reads value, gradient, two moments, and writes three
UPDATE_REACHES = 0.6  # of the bandwidth: nothing but reading and writing in order
# Fractions of a data sheet's rates that training reaches: products, memory for everything else, and links.
PRODUCTS = 1.0
MOVES = 0.23
LINKS = 0.7


@with_config(STRICT)
@dataclass(frozen=True)
class Machine:
    """A device and its links. Rates are per second, sizes in bytes, times in seconds.

    Attributes:
        memory: the device's size.
        operations: multiply-adds in products, by precision.
        moved: memory traffic in everything else.
        least: shortest forward, input gradient or weight gradient, bound by launches.
        graph_start: added to each of them in a CUDA graph, in place of `least` and `start`; None without figures.
        update: an optimizer step's time for each parameter byte.
        within: link inside a node.
        between: link between nodes.
        program: a rank's memory besides tensors: interpreter, libraries, GPU context, message buffers.
        rest: unused memory kept by the allocator, as a fraction of the tensors' memory.
        source: where the figures come from.
        start: interpreter overhead in each forward, input gradient or weight gradient.
    """

    name: str
    kind: Literal["cpu", "cuda"]
    memory: float
    operations: dict[str, float]
    moved: float
    least: float
    update: float
    within: LinkCost
    between: LinkCost
    program: float
    rest: float
    source: Annotated[str, Field(validation_alias=AliasChoices("source", "told"))]
    start: float = 0.0
    graph_start: float | None = None


@dataclass(frozen=True)
class Cluster:
    """Available devices."""

    ranks: int
    ranks_of_node: int
    machine: Machine

    def counts(self) -> list[int]:
        """Numbers of devices to plan for: powers of two, also in whole nodes, and all devices.

        Several nodes are whole nodes: torchrun starts equally many ranks on each.
        """
        found = {self.ranks}
        for power in range(self.ranks.bit_length()):
            found |= {1 << power, self.ranks_of_node << power}
        able = []
        for count in sorted(found):
            is_whole = count <= self.ranks_of_node or count % self.ranks_of_node == 0
            if is_whole and count <= self.ranks:
                able.append(count)
        return able

    def link(self, grid: Grid, axis: Axis) -> LinkCost:
        """The link along an axis: between nodes unless each group lies on one node."""
        extent = 1
        # Later axes vary faster: their ranks are nearer neighbours.
        for each in reversed(AXES):
            extent *= grid.size(each)
            if each == axis:
                break
        is_within = extent <= self.ranks_of_node and self.ranks_of_node % extent == 0
        return self.machine.within if is_within else self.machine.between

    def problems(self) -> list[str]:
        """Devices that do not fill whole nodes."""
        nodes = self.ranks // max(self.ranks_of_node, 1)
        if self.ranks <= self.ranks_of_node or self.ranks == nodes * self.ranks_of_node:
            return []
        return [
            f"--gpus {self.ranks} are not whole nodes of --gpus-per-node {self.ranks_of_node}, and torchrun starts as "
            f"many ranks on each: take --gpus {nodes * self.ranks_of_node} or {(nodes + 1) * self.ranks_of_node}"
        ]


def _gpu(
    name: str,
    memory: float,
    teraflops: dict[str, float],
    bandwidth: float,
    links: tuple[float, float],
    latency: float = 1e-5,
) -> Machine:
    """A GPU by its data sheet.

    Args:
        links: bytes a second in one direction, within a node and between nodes.
    """
    within, between = links
    return Machine(
        name=name,
        kind="cuda",
        memory=memory,
        operations={precision: PRODUCTS * 0.5e12 * rate for precision, rate in teraflops.items()},
        moved=MOVES * bandwidth,
        # Eager steps are bound by their host. The 22 layers of Spikformer-8-512, in three parts each, start 746
        # operators (tests/kernels/test_counted.py). One took 69 us beside an H200: 72.6 ms for 1,058 (docs/gpu.md).
        # Kernels start with less Python since, which no GPU has measured: the figure is an upper bound.
        least=7.8e-4,
        # With CUDA graphs that step took 27.9 ms, its kernels 23.3 ms.
        graph_start=(27.9e-3 - 23.3e-3) / 66,
        update=MOVED_IN_UPDATE / (UPDATE_REACHES * bandwidth),
        within=LinkCost(latency, 1 / (LINKS * within)),
        between=LinkCost(2.5 * latency, 1 / (LINKS * between)),
        program=1.5e9,
        rest=0.05,
        source=f"the table of devices; of its peak rates, products reach {PRODUCTS:.0%}, memory {MOVES:.0%} and links "
        f"{LINKS:.0%}: fitted to figures that SpikingJelly publishes for an RTX 4090 and its own implementation; "
        "small batches take the time of launches, measured beside one H200 (docs/planner.md): compare with a run",
    )


_HOPPER = {"fp32": 67.0, "tf32": 495.0, "bf16": 989.0, "fp64": 33.5}
_AMPERE = {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp64": 9.75}
_ADA = {"fp32": 82.6, "tf32": 82.6, "bf16": 165.0, "fp64": 41.3}
DEVICES: Registry[Machine] = Registry(
    "--device-name",
    {
        "h100": _gpu("h100", 80 * GB, _HOPPER, 3.35e12, (450 * GB, 50 * GB)),
        "h200": _gpu("h200", 141 * GB, _HOPPER, 4.8e12, (450 * GB, 50 * GB)),
        "a100": _gpu("a100", 80 * GB, _AMPERE, 2.04e12, (300 * GB, 25 * GB)),
        # PCI Express without access to a peer's memory: every byte goes up to the host's memory and down again.
        "4090": _gpu("4090", 24 * GB, _ADA, 1.01e12, (12.5 * GB, 12.5 * GB), latency=4e-5),
        "cpu-core": Machine(
            name="cpu-core",
            kind="cpu",
            memory=4 * GB,
            operations={"fp32": 0.635 * 96e9, "fp64": 0.635 * 48e9},  # of two products of 512 bits a cycle, at 3 GHz
            moved=3e9,
            least=2e-5,
            update=MOVED_IN_UPDATE / (UPDATE_REACHES * 10e9),
            within=LinkCost(5e-5, 1 / (0.129 * 4 * GB)),
            between=LinkCost(1.25e-4, 1 / (0.129 * 1.25 * GB)),
            program=0.45e9,
            rest=0.0,
            source="fitted to ten layouts of one core and of two cores of an AMD EPYC, with --sparse-products off; ten "
            "others came out within 10 % (docs/planner.md). Sums over spikes are faster at low firing rates: "
            "--measure includes them",
            start=1.18e-3,
        ),
    },
    also=(AUTO_DEVICE,),
)
