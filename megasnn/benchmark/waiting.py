"""How long training steps wait for their data: real steps of a model on one rank, fed by the loader."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from megasnn.config import DataConfig, PretrainConfig, TrainingConfig
from megasnn.data import BatchLoader, open_datasets
from megasnn.engine import Engine
from megasnn.models.description import ModelDescription
from megasnn.models.spikformer.dimensions import PretrainSpikformerConfig, SpikformerConfig
from megasnn.models.spikformer.model import describe_spikformer
from megasnn.models.vgg_dvs.dimensions import PretrainVggDvsConfig, VggDvsConfig
from megasnn.models.vgg_dvs.model import describe_vgg_dvs
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.preprocess.sample import shards_of_sample
from megasnn.telemetry.timers import Timers
from megasnn.training.setup import build_context, neuron_spec
from megasnn.training.step import TrainingStep

if TYPE_CHECKING:
    from megasnn.benchmark.loading import LoadingBenchmark

_WARM_UP = 2


@dataclass(frozen=True)
class Waiting:
    """Attributes: milliseconds of a step with its waiting, and the share of all steps' time that was waiting."""

    step_ms: float
    share: float


def measure_waiting(benchmark: LoadingBenchmark, data: DataConfig, workers: int) -> Waiting:
    """Trains for a few steps, each one batch, and takes the time until a batch is there."""
    print(f"training with {workers} workers", file=sys.stderr)
    config, model = _configuration(benchmark, replace(data, num_workers=workers))
    state = initialize_model_parallel(device=torch.device("cpu"))
    context = build_context(state, "fp32", config.neuron.neuron_backend)
    engine = Engine(model, state, context, [range(len(model.layers))])
    step = TrainingStep(config, engine, state, Timers())
    waited = spent = 0.0
    with closing(_loader(config, model).batches()) as batches:
        for number in range(_WARM_UP + benchmark.steps):
            begin = time.perf_counter()
            batch = next(batches)
            came = time.perf_counter()
            step(batch, number)
            if number >= _WARM_UP:
                waited += came - begin
                spent += time.perf_counter() - begin
    destroy_model_parallel()
    return Waiting(1000 * spent / benchmark.steps, waited / spent)


def _configuration(benchmark: LoadingBenchmark, data: DataConfig) -> tuple[PretrainConfig, ModelDescription]:
    size, steps = benchmark.batch_size, _WARM_UP + benchmark.steps
    training = TrainingConfig(micro_batch_size=size, global_batch_size=size, train_iters=steps)
    if benchmark.kind == "events":
        vgg = VggDvsConfig(
            channels=benchmark.channels,
            image_size=benchmark.image_size,
            time_steps=benchmark.time_steps,
            num_classes=benchmark.num_classes,
        )
        config = PretrainVggDvsConfig(model=vgg, training=training, data=data)
        return config, describe_vgg_dvs(vgg, neuron_spec(config))
    spikformer = SpikformerConfig(
        image_size=benchmark.image_size, time_steps=benchmark.time_steps, num_classes=benchmark.num_classes
    )
    of_images = PretrainSpikformerConfig(model=spikformer, training=training, data=data)
    return of_images, describe_spikformer(spikformer, neuron_spec(of_images))


def _loader(config: PretrainConfig, model: ModelDescription) -> BatchLoader:
    return BatchLoader(
        open_datasets(config.data, model.input_shape, model.num_classes, shards_of_sample).train,
        seed=1,
        shuffle=True,
        augment=config.data.augment,
        global_batch_size=config.training.global_batch_size,
        micro_batch_size=config.training.micro_batch_size,
        dp_size=1,
        dp_rank=0,
        need_images=True,
        need_labels=True,
        num_workers=config.data.num_workers,
    )
