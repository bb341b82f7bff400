"""What a rank computes on, and what it is connected by: measured, or from the table of devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pydantic import with_config

from megasnn.files import STRICT
from megasnn.pipeline.cost_model import LinkCost
from megasnn.registry import Registry

GB = 1e9
AUTO = "auto"  # stands for the device that was measured


@with_config(STRICT)
@dataclass(frozen=True)
class Machine:
    """One device, and its links.

    Attributes:
        name, kind: of the device. memory: bytes.
        operations: multiply-adds a second that products reach. moved: bytes a second that all else reaches.
        least: seconds that each of the three parts of a layer takes at least, for what has to be started.
        update: seconds that an optimizer's step takes for each byte of the parameters.
        within, between: links of a device to others of its node, and of other nodes.
        program: bytes that a rank takes besides tensors: interpreter, libraries; on a GPU its context and buffers of
            messages.
        rest: what an allocator keeps and nobody uses, as a share of what tensors take.
        watts: while it computes.
        told: where the figures come from.
        start: seconds that each of these parts takes besides, for programs that are not compiled.
        alone: how many times as fast a rank computes with nobody beside it on its node, where cores share a clock and
            a memory.
        summed: seconds in which ranks of a node sum up a byte of what lies in memory that they share; 0 where sums
            travel on the links.
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
    watts: float
    told: str
    start: float = 0.0
    alone: float = 1.0
    summed: float = 0.0


@dataclass(frozen=True)
class Device:
    """A device by its data sheet.

    Attributes:
        summary: for --help.
        operations: multiply-adds a second at its peak, by precision. bandwidth: bytes a second of its memory.
        within, between: bytes a second of its links, in one direction. latency: seconds of a message within a node.
    """

    summary: str
    kind: Literal["cpu", "cuda"]
    memory: float
    operations: dict[str, float]
    bandwidth: float
    within: float
    between: float
    latency: float
    watts: float

    def machine(self, name: str, precision: str, reached: Reached | None = None) -> Machine:
        """What it is taken to reach with `--precision`. Raises ValueError for one that it has not.

        Args:
            reached: shares of the peak rates; None: those of its kind.
        """
        if precision not in self.operations:
            known = ", ".join(self.operations)
            raise ValueError(f"--precision {precision}: {self.summary} is known for {known}; take another device")
        reached = reached or REACHED[self.kind]
        moved = self.bandwidth * reached.moved
        slow = LinkCost(2.5 * self.latency, 1 / (reached.links * self.between))
        return Machine(
            name=name,
            kind=self.kind,
            memory=self.memory,
            operations=self.operations[precision] * reached.operations,
            moved=moved,
            least=reached.least,
            update=MOVED_IN_UPDATE / (UPDATE_REACHES * self.bandwidth),
            within=LinkCost(self.latency, 1 / (reached.links * self.within)),
            between=slow,
            program=reached.program,
            rest=reached.rest,
            watts=self.watts,
            start=reached.start,
            alone=reached.alone,
            summed=MOVED_IN_SUM / (UPDATE_REACHES * self.bandwidth) if self.kind == "cpu" else 0.0,
            told=f"the table of devices; of its peak rates, products reach {reached.operations:.0%}, memory "
            f"{reached.moved:.0%} and links {reached.links:.0%}: {reached.told}",
        )


@dataclass(frozen=True)
class Reached:
    """Shares of peak rates, and constants of a kind of device; `told`: where they are from."""

    operations: float
    moved: float
    links: float
    least: float
    program: float
    rest: float
    told: str
    start: float = 0.0
    alone: float = 1.0


MOVED_IN_UPDATE = 7.0  # bytes for each byte of parameters: AdamW reads value, gradient, two moments, and writes three
MOVED_IN_SUM = (
    2.0  # for each byte of gradients: of n ranks each reads, and writes, a part of 1 / n in the memory of all
)
UPDATE_REACHES = 0.6  # of the bandwidth: nothing but reading and writing in order
REACHED = {
    "cuda": Reached(
        *(1.0, 0.23, 0.7),
        least=1.0e-4,
        program=1.5e9,
        rest=0.05,
        told="the first two are fitted to two figures that SpikingJelly publishes for an RTX 4090, of its own "
        "implementation, within 9 %; MegaSNN was not measured on a GPU: compare with a run before you rely on it",
    ),
    "cpu": Reached(
        *(0.635, 0.3, 0.129),
        least=2e-5,
        program=0.45e9,
        rest=0.0,
        start=1.18e-3,
        alone=1.04,
        told="fitted to ten layouts of one core and of two cores of an AMD EPYC, with --sparse-products off; ten "
        "others came out within 6 %, half of them within 4 % (docs/planner.md). Sums over spikes take less time, the "
        "fewer they are: --measure takes them as they are, on this one",
    ),
}


def _tensor_cores(fp32: float, tf32: float, bf16: float) -> dict[str, float]:
    """Of teraflops."""
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
            watts=700,
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
            watts=700,
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
            watts=400,
        ),
        "4090": Device(
            "GeForce RTX 4090, 24 GB, PCI Express 4",
            "cuda",
            24 * GB,
            _tensor_cores(82.6, 82.6, 165),
            bandwidth=1.01e12,
            within=25 * GB,
            between=12.5 * GB,
            latency=2e-5,
            watts=450,
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
            watts=10,
        ),
    },
    also=(AUTO,),
)


def with_memory(machine: Machine, memory: float | None) -> Machine:
    """The same with so many bytes for each rank."""
    return machine if memory is None else replace(machine, memory=memory)
