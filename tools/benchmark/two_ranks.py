"""What benchmarks beside the planner share: layouts of one rank and of two, and the run that these divide."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megasnn.config import PretrainConfig, TrainingConfig
from megasnn.grid import Grid
from megasnn.models.building import describe
from megasnn.planner.analysis import Analysis
from megasnn.planner.analyze import counted_sizes
from megasnn.planner.cluster import Cluster
from megasnn.planner.layout import Layout
from megasnn.planner.machines import Machine
from tools.benchmark.models import Dimensions, configuration
from tools.benchmark.training_steps import OPTIMIZER

RANKS = 2
UNLIMITED = 1e15  # bytes
LAYOUTS = {
    "one": Layout(Grid()),
    "one-always": Layout(Grid(), recompute="always"),
    "dp2": Layout(Grid(data=2)),
    "dp2-zero1": Layout(Grid(data=2), shards_optimizer=True),
    "wp2": Layout(Grid(weight=2)),
    "tp2": Layout(Grid(tensor=2)),
    "cp2": Layout(Grid(context=2)),
    "cp2rows": Layout(Grid(context=2), cut="rows"),
    "pp2-1f1b": Layout(Grid(pipeline=2)),
    "pp2-zb1p": Layout(Grid(pipeline=2), schedule="zb1p"),
    "pp2-zbv": Layout(Grid(pipeline=2), schedule="zbv", chunks=2),
    "pp2-always": Layout(Grid(pipeline=2), recompute="always"),
}


@dataclass(frozen=True)
class Run:
    """A model and the sizes of a step.

    Attributes:
        micro_batch_size: samples of a micro-batch. micro_batches: of a step, over all replicas.
        sparse_products: as pretrain takes it. The table of devices knows nothing of how many spikes there are.
    """

    model: Dimensions
    micro_batch_size: int
    micro_batches: int
    sparse_products: Literal["auto", "off"] = "auto"

    @property
    def samples(self) -> int:
        """Of a step."""
        return self.micro_batch_size * self.micro_batches

    def configuration(self) -> PretrainConfig:
        """On one rank."""
        sizes = self.micro_batch_size, self.samples
        training = TrainingConfig(*sizes, train_iters=1, sparse_products=self.sparse_products)
        return configuration(self.model, training=training, optimizer=OPTIMIZER)

    def counted(self) -> Analysis:
        """What the planner is told of one rank and of two without a clock."""
        config = self.configuration()
        return counted_sizes(describe(config.model, config.neuron.spec), config, [1, RANKS], [RANKS], on_cpu=True)


def cluster_of(machine: Machine, memory: float = UNLIMITED) -> Cluster:
    """The ranks, on one node. memory: bytes of each."""
    return Cluster(RANKS, RANKS, replace(machine, memory=memory))


def unknown_layouts(names: Sequence[str], known: Collection[str] = LAYOUTS) -> list[str]:
    """What is wrong with --layouts."""
    return [f"--layouts {name}: known are {', '.join(known)}" for name in names if name not in known]
