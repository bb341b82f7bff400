"""A model that the planner's tests analyse once for all of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from unittest.mock import patch

from megasnn.common.grid import AXES, Grid
from megasnn.config import PretrainConfig, TrainingConfig
from megasnn.models.build import describe_model
from megasnn.models.model import run_config
from megasnn.models.spike_lm.model import SpikeLM
from megasnn.models.spikformer.model import Spikformer
from megasnn.planner.analyze import counted_sizes
from megasnn.planner.candidates import Layout
from megasnn.planner.costs_file import Analysis
from megasnn.planner.machines import DEVICES, Cluster

MODEL = Spikformer(embed_dim=32, depth=1, num_heads=2, image_size=16, in_channels=3, time_steps=2)


def config(samples: int = 16, micro_batch: int = 4, **parallel: object) -> PretrainConfig:
    training = TrainingConfig(micro_batch_size=micro_batch, global_batch_size=samples, train_iters=9)
    found = run_config(Spikformer)(model=MODEL, training=training)
    return replace(found, parallel=replace(found.parallel, **parallel))  # type: ignore[arg-type]


def text_config(micro_batch: int = 4) -> PretrainConfig:
    """A language model, whose tokens ranks divide."""
    training = TrainingConfig(micro_batch_size=micro_batch, global_batch_size=16, train_iters=9)
    model = SpikeLM(embed_dim=32, depth=1, num_heads=2, time_steps=2, seq_length=64, vocab_size=67)
    return run_config(SpikeLM)(model=model, training=training)


@cache
def analysis() -> Analysis:
    return counted(on_cpu=False)


@cache
def on_cpu() -> Analysis:
    """Of runs on a CPU, as those of the tests are."""
    return counted(on_cpu=True)


def counted(on_cpu: bool) -> Analysis:
    """For few sizes."""
    run = config()
    with patch.multiple("megasnn.planner.analyze", TENSOR_SIZES=(1, 2, 3), CONTEXT_SIZES=(2, 8)):
        return counted_sizes(describe_model(run.model, run.neuron.spec), run, on_cpu)


def layout(size: int = 4, **values: object) -> Layout:
    """A layout from sizes of axes and other fields."""
    sizes = {axis: values.pop(axis) for axis in AXES if axis in values}
    return Layout(Grid(**sizes), size, **values)  # type: ignore[arg-type]


def cluster(ranks: int = 8, gigabytes: float = 4.0, device: str = "cpu-core", **machine: object) -> Cluster:
    # As if nothing took time to start: on a core, sharing such a small model would not be worth it.
    known = replace(DEVICES[device], start=0.0, memory=1e9 * gigabytes)
    return Cluster(ranks, min(ranks, 8), replace(known, **machine))  # type: ignore[arg-type]
