"""What the planner is told of layers that sleep, and what it foresees of layouts with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

from megasnn.comm.codec import Content
from megasnn.config import PretrainConfig, TrainingConfig
from megasnn.config.checks import above, at_least
from megasnn.data_parallel import buckets
from megasnn.models.model import run_config
from megasnn.models.spikformer.dimensions import Spikformer
from megasnn.pipeline.costs import LayerCost
from megasnn.planner import states
from megasnn.planner.analysis import Analysis, Counted, HeldTensor, LayerFacts, LayerSeconds, Timed, identity
from megasnn.planner.cluster import Cluster
from megasnn.planner.machines import Machine
from tools.benchmark.harness import Flags
from tools.benchmark.links import Links
from tools.benchmark.sleeping import FLOAT, ROW, SleepingLayer

AMOUNTS = "forward_ms", "input_gradient_ms", "weight_gradient_ms", "gradient_kb", "parameters_kb"


@dataclass(frozen=True)
class SleepingPlansBenchmark(Flags):
    """Plans for 4, 8 and 16 ranks, beside ranks that sleep where they would compute, over links that take a stated
    time: whether steps take as long as the planner foresees, and whether what it takes is the fastest."""

    ranks: tuple[int, ...] = (4, 8, 16)
    """Devices; each number by itself."""
    micro_batches: int = 32
    """Of a step, over all replicas."""
    layers: int = 16
    """Of the model."""
    forward_ms: float = 4.0
    """Milliseconds of a layer's forward; as long again where it is computed again."""
    input_gradient_ms: float = 4.0
    """Milliseconds of the first part of its backward."""
    weight_gradient_ms: float = 4.0
    """Milliseconds of the second part."""
    gradient_kb: float = 128.0
    """KB (10^3 bytes) of its output in float32, and of the gradient of that."""
    parameters_kb: float = 256.0
    """KB of its parameters."""
    growth: float = 1.0
    """From the first layer to the last, parameters grow to so many times as much, and outputs shrink as much."""
    bucket_kb: float = 512.0
    """KB of gradients that a bucket is closed with: few bytes, as many buckets as a large model has."""
    update_ms: float = 10.0
    """Milliseconds that an optimizer sleeps for a MB of parameters."""
    latency_ms: float = 0.25
    """Milliseconds that a message takes on a link, whatever its size."""
    bandwidth: float = 100.0
    """MB (10^6 bytes) that a link carries in a second."""
    slower: float = 1.0
    """How many times as long all of that takes: layers, links and the optimizer. Where many ranks share few cores, what
    their hosts do is then a small part of a step."""
    best: int = 10
    """How many of the best layouts are rehearsed, as the planner ranks them; and the best one of each kind."""
    rounds: int = 5
    """How often each layout has its turn."""
    steps: int = 1
    """Timed steps of a turn; two untimed ones come before them, in which only links take time."""
    timeout: float = 300.0
    """Seconds that a turn may take before the benchmark gives up."""

    @property
    def links(self) -> Links:
        return Links(1e-3 * self.slower * self.latency_ms, 1e-6 * self.slower / self.bandwidth)

    @property
    def update(self) -> float:
        """Seconds of the optimizer for each byte of the parameters."""
        return 1e-9 * self.slower * self.update_ms

    def sleeping_layers(self) -> list[SleepingLayer]:
        stated = self.forward_ms, self.input_gradient_ms, self.weight_gradient_ms
        times = (1e-3 * self.slower * each for each in stated)
        forward, inputs, weights = times
        found = []
        for number in range(self.layers):
            grown = self.growth ** (number / max(1, self.layers - 1))
            sizes = round(1e3 * self.gradient_kb / grown), round(1e3 * self.parameters_kb * grown)
            found.append(SleepingLayer(forward, inputs, weights, forward, sizes[0], Content.DENSE, sizes[1]))
        return found

    def problems(self) -> list[str]:
        wrong = at_least(self, 1, "micro_batches", "layers", "best", "rounds", "steps")
        wrong += above(self, 0, "timeout", "slower", "bandwidth", "bucket_kb", "growth") + at_least(self, 0, *AMOUNTS)
        wrong += at_least(self, 0, "update_ms", "latency_ms")
        wrong += [f"--ranks {count}: give numbers of 2 or more" for count in self.ranks if count < 2]
        return wrong + ["--ranks must name at least one number"] * (not self.ranks)

    def configuration(self) -> PretrainConfig:
        """Of a run on one rank; the model stands for the one that sleeps."""
        training = TrainingConfig(1, self.micro_batches, train_iters=1)
        return run_config(Spikformer)(model=MODEL, training=training)

    def cluster(self, ranks: int) -> Cluster:
        """All ranks on one node, all links alike."""
        link = self.links.cost()
        machine = Machine(
            *("ranks that sleep", "cpu"),
            memory=1e12,
            operations=1e9,
            moved=1e9,
            least=1e-6,
            update=self.update,
            within=link,
            between=link,
            program=0.0,
            rest=0.0,
            watts=0.0,
            told="stated",
        )
        return Cluster(ranks, ranks, machine)

    def analysis(self) -> Analysis:
        """The costs that the ranks sleep, as if they had been measured."""
        layers = self.sleeping_layers()
        costs = tuple(each.cost() for each in layers)
        counted = tuple(_counted(each) for each in costs)
        names = [f"sleeper.{number}" for number in range(self.layers)]
        return Analysis(
            1,
            self.configuration().model.name,
            identity(self.configuration()),
            tuple(
                LayerFacts(name, name, each.parameters // FLOAT, 0, each.message, False, 1)
                for name, each in zip(names, costs, strict=True)
            ),
            (1, 2),
            (Counted(1, 1, "samples", None, (counted, counted), tuple(map(_tensors, names, layers))),),
            (Timed(1, 1, "samples", 1, 1, tuple(map(_seconds, costs))),),
            self.cluster(1).machine,
        )


MODEL = Spikformer(embed_dim=32, depth=1, num_heads=2, image_size=16, in_channels=3, time_steps=2)


def _counted(cost: LayerCost) -> LayerCost:
    """Its bytes; it keeps nothing but what goes through it."""
    still = replace(cost, forward=0.0, input_gradient=0.0, weight_gradient=0.0, again=0.0)
    return replace(still, working_again=0, working_whole=0, deferred=0, output=cost.gradient)


def _seconds(cost: LayerCost) -> LayerSeconds:
    again = cost.forward if cost.again is None else cost.again
    return LayerSeconds(cost.forward, cost.input_gradient, cost.weight_gradient, again, 0.0, 0.0)


def _tensors(name: str, layer: SleepingLayer) -> tuple[HeldTensor, ...]:
    rows = max(1, layer.parameters // (FLOAT * ROW))
    return (HeldTensor(f"{name}.weight", (rows, ROW), FLOAT, True, FLOAT),)


@contextmanager
def buckets_of(size: int) -> Iterator[None]:
    """Inside, buckets are closed when they hold so many bytes: those of ranks, and those that the planner foresees."""
    with mock.patch.object(buckets, "BUCKET_BYTES", size), mock.patch.object(states, "BUCKET_BYTES", size):
        yield
