"""Plans for thousands of devices: how long they take on one core, and what they look at."""

from __future__ import annotations

import time
from functools import cache

from megasnn.config import PretrainConfig, TrainingConfig
from megasnn.planner.analysis import Analysis
from megasnn.planner.analyze import analyze
from megasnn.planner.cluster import Cluster
from megasnn.planner.machines import DEVICES
from megasnn.planner.plan import plan
from tools.benchmark.harness import Figures
from tools.benchmark.models import ModelName, configuration, dimensions_of

OF_NODE = 8
MICRO_BATCH, MICRO_BATCHES = 8, 4  # samples, and how many of them for each device


@cache
def known(model: ModelName) -> Analysis:
    """Every size of tensor and context parallelism that is asked for by default."""
    return analyze(_config(model, 1))


def _config(model: ModelName, ranks: int) -> PretrainConfig:
    training = TrainingConfig(MICRO_BATCH, MICRO_BATCH * MICRO_BATCHES * ranks, train_iters=1)
    return configuration(dimensions_of(model), training=training)


def measure_plan(model: ModelName, ranks: int) -> Figures:
    """A plan for so many H100s, eight on a node, from costs that are known."""
    analysis, config = known(model), _config(model, ranks)
    cluster = Cluster(ranks, min(ranks, OF_NODE), DEVICES["h100"].machine("h100", config.training.precision))
    begin = time.process_time()
    found = plan(analysis, config, cluster)
    return {
        "plan_s": time.process_time() - begin,
        "layouts": len(found.candidates),
        "without_reason": sum(not each.reason for each in found.candidates[1:]),
        "simulated": found.simulated,
        "plan": str(found.layout),
    }
