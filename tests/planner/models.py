"""A model that the planner's tests analyse once for all of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from megasnn.config import PretrainConfig, TrainingConfig
from megasnn.models.build import describe
from megasnn.models.model import run_config
from megasnn.models.spikformer.model import Spikformer
from megasnn.planner.analysis import Analysis
from megasnn.planner.analyze import analyze, counted_sizes
from megasnn.planner.cluster import Cluster
from megasnn.planner.machines import DEVICES

MODEL = Spikformer(embed_dim=32, depth=1, num_heads=2, image_size=16, in_channels=3, time_steps=2)


def config(samples: int = 16, micro_batch: int = 4) -> PretrainConfig:
    training = TrainingConfig(micro_batch_size=micro_batch, global_batch_size=samples, train_iters=9)
    return run_config(Spikformer)(model=MODEL, training=training)


@cache
def analysis() -> Analysis:
    return analyze(config(), tensor_sizes=(2, 3), context_sizes=(2, 8))


@cache
def on_cpu() -> Analysis:
    """Of runs on a CPU, as those of the tests are."""
    run = config()
    return counted_sizes(describe(run.model, run.neuron.spec), run, (1, 2), (2,), on_cpu=True)


def cluster(ranks: int = 8, gigabytes: float = 4.0, device: str = "cpu-core") -> Cluster:
    # As if nothing took time to start: on a core, sharing such a small model would not be worth it.
    machine = replace(DEVICES[device].machine(device, "fp32"), start=0.0)
    return Cluster(ranks, min(ranks, 8), replace(machine, memory=1e9 * gigabytes))
