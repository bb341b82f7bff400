"""Devices that a plan is for, by measurement or from the table, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import with_config

from megasnn.files import STRICT
from megasnn.grid import AXES, Axis, Grid
from megasnn.pipeline.cost_model import LinkCost
from megasnn.registry import Registry

GB = 1e9
AUTO = "auto"  # stands for the device that was measured
MOVED_IN_UPDATE = 7.0  # bytes for each byte of parameters: AdamW reads value, gradient, two moments, and writes three
UPDATE_REACHES = 0.6  # of the bandwidth: nothing but reading and writing in order


@with_config(STRICT)
@dataclass(frozen=True)
class Machine:
    """One device, and its links.

    Attributes:
        name, kind: of the device. memory: bytes.
        operations: multiply-adds a second that products reach. moved: bytes a second that all else reaches.
        least: seconds that each of the three parts of a layer takes at least, for what has to be started.
        start: seconds that each of these parts takes besides, for programs that are not compiled.
        alone: how many times as fast a rank computes with nobody beside it on its node, where cores share a clock.
        update: seconds that an optimizer's step takes for each byte of the parameters.
        within, between: links of a device to others of its node, and of other nodes.
        program: bytes of a rank besides tensors: interpreter, libraries; on a GPU its context and message buffers.
        rest: what an allocator keeps and nobody uses, as a share of what tensors take.
        told: where the figures come from.
    """

    name: str
    kind: Literal["cpu", "cuda"]
    memory: float
    operations: float
    moved: float
    least: float
    update: float
    within: LinkCost
    between: LinkCost
    program: float
    rest: float
    told: str
    start: float = 0.0
    alone: float = 1.0


@dataclass(frozen=True)
class Device:
    """A device by its data sheet, and the shares of it that training is taken to reach.

    Attributes:
        summary: for --help.
        peak: multiply-adds a second, by precision. bandwidth: bytes a second of its memory.
        within, between: bytes a second of its links, in one direction. latency: seconds of a message within a node.
        products, moved, links: shares of peak, bandwidth and links that are reached.
        least, start, alone, program, rest: as in Machine.
        told: where the shares are from.
    """

    summary: str
    kind: Literal["cpu", "cuda"]
    memory: float
    peak: dict[str, float]
    bandwidth: float
    within: float
    between: float
    latency: float
    products: float = 1.0
    moved: float = 0.23
    links: float = 0.7
    # Eager steps are bound by their host: 1,125 launches of the 22 layers of Spikformer-8-512, at 33 us of Python each,
    # are 17 for each of the three parts of a layer.
    least: float = 5.6e-4
    start: float = 0.0
    alone: float = 1.0
    program: float = 1.5e9
    rest: float = 0.05
    told: str = (
        "fitted to figures that SpikingJelly publishes for an RTX 4090 and its own implementation (docs/planner.md); "
        "MegaSNN was not measured on a GPU: compare with a run before you rely on it"
    )

    def machine(self, name: str, precision: str) -> Machine:
        """Machine as it is taken to be with `--precision`. Raises ValueError for one that it has not."""
        if precision not in self.peak:
            known = ", ".join(self.peak)
            raise ValueError(f"--precision {precision}: {self.summary} is known for {known}; take another device")
        return Machine(
            name=name,
            kind=self.kind,
            memory=self.memory,
            operations=self.peak[precision] * self.products,
            moved=self.bandwidth * self.moved,
            least=self.least,
            update=MOVED_IN_UPDATE / (UPDATE_REACHES * self.bandwidth),
            within=LinkCost(self.latency, 1 / (self.links * self.within)),
            between=LinkCost(2.5 * self.latency, 1 / (self.links * self.between)),
            program=self.program,
            rest=self.rest,
            told=f"the table of devices; of its peak rates, products reach {self.products:.0%}, memory "
            f"{self.moved:.0%} and links {self.links:.0%}: {self.told}",
            start=self.start,
            alone=self.alone,
        )


@dataclass(frozen=True)
class Cluster:
    """Devices that there are. Attributes: ranks_of_node: of them on one node. machine: what each of them is."""

    ranks: int
    ranks_of_node: int
    machine: Machine

    def counts(self) -> list[int]:
        """Numbers of devices that are looked at: powers of two, of devices and of whole nodes, and all that there are.

        torchrun starts as many ranks on each node: what is more than one node is whole nodes.
        """
        powers = [1 << power for power in range(self.ranks.bit_length())]
        found = {*powers, *(self.ranks_of_node * power for power in powers), self.ranks}
        whole = (each for each in found if each <= self.ranks_of_node or each % self.ranks_of_node == 0)
        return sorted(each for each in whole if each <= self.ranks)

    def link(self, grid: Grid, axis: Axis) -> LinkCost:
        """Between the ranks along an axis; across nodes where they are not all of one. Neighbours are of one node."""
        extent = 1
        for each in reversed(AXES):
            extent *= grid.size(each)
            if each == axis:
                break
        is_within = extent <= self.ranks_of_node and self.ranks_of_node % extent == 0
        return self.machine.within if is_within else self.machine.between

    def problems(self) -> list[str]:
        """Devices that are not as many on each node."""
        nodes = self.ranks // max(self.ranks_of_node, 1)
        if self.ranks <= self.ranks_of_node or self.ranks == nodes * self.ranks_of_node:
            return []
        return [
            f"--gpus {self.ranks} are not whole nodes of --gpus-per-node {self.ranks_of_node}, and torchrun starts as "
            f"many ranks on each: take --gpus {nodes * self.ranks_of_node} or {(nodes + 1) * self.ranks_of_node}"
        ]


def _tensor_cores(fp32: float, tf32: float, bf16: float) -> dict[str, float]:
    """Tensor cores of so many teraflops."""
    rates = {"fp32": fp32, "tf32": tf32, "bf16": bf16, "fp64": fp32 / 2}
    return {name: 0.5e12 * rate for name, rate in rates.items()}


DEVICES: Registry[Device] = Registry(
    "--device-name",
    {
        "h100": Device(
            "H100 SXM, 80 GB",
            "cuda",
            80 * GB,
            _tensor_cores(67, 495, 989),
            bandwidth=3.35e12,
            within=450 * GB,
            between=50 * GB,
            latency=1e-5,
        ),
        "h200": Device(
            "H200 SXM, 141 GB",
            "cuda",
            141 * GB,
            _tensor_cores(67, 495, 989),
            bandwidth=4.8e12,
            within=450 * GB,
            between=50 * GB,
            latency=1e-5,
        ),
        "a100": Device(
            "A100 SXM, 80 GB",
            "cuda",
            80 * GB,
            _tensor_cores(19.5, 156, 312),
            bandwidth=2.04e12,
            within=300 * GB,
            between=25 * GB,
            latency=1e-5,
        ),
        "4090": Device(
            "GeForce RTX 4090, 24 GB, PCI Express 4",
            "cuda",
            24 * GB,
            _tensor_cores(82.6, 82.6, 165),
            bandwidth=1.01e12,
            # PCI Express without access to a peer's memory: every byte goes up to the host's memory and down again.
            within=12.5 * GB,
            between=12.5 * GB,
            latency=4e-5,
        ),
        "cpu-core": Device(
            "one core of a server, with AVX-512",
            "cpu",
            4 * GB,
            {"fp32": 96e9, "fp64": 48e9},  # two products of 512 bits a cycle, at 3 GHz
            bandwidth=10e9,
            within=4 * GB,
            between=1.25 * GB,
            latency=5e-5,
            products=0.635,
            moved=0.3,
            links=0.129,
            least=2e-5,
            start=1.18e-3,
            alone=1.04,
            program=0.45e9,
            rest=0.0,
            told="fitted to ten layouts of one core and of two cores of an AMD EPYC, with --sparse-products off; ten "
            "others came out within 6 % (docs/planner.md). Sums over spikes take less time, the fewer they are: "
            "--measure takes them as they are",
        ),
    },
    also=(AUTO,),
)
