"""How long training steps wait for their data: real steps of a model on one rank, fed by the loader."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass

import torch

from megasnn.config import TrainingConfig
from megasnn.data import BatchLoader, LoaderOptions, ShardDataset, Share
from megasnn.engine import Engine
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from tools.benchmark.models import Dimensions, configuration

_WARM_UP = 2


@dataclass(frozen=True)
class Waiting:
    """Attributes: milliseconds of a step with its waiting, and the share of all steps' time that was waiting."""

    step_ms: float
    share: float


def one_rank_loader(dataset: ShardDataset, augment: str, batch_size: int, workers: int) -> BatchLoader:
    """The loader of a single rank that takes a batch in one go."""
    options = LoaderOptions(seed=1, augment=augment, num_workers=workers)
    return BatchLoader(dataset, Share(batch_size, batch_size), options)


def measure_waiting(dimensions: Dimensions, loader: BatchLoader, batch_size: int, steps: int) -> Waiting:
    """Trains for a few steps, each one batch of the loader, and takes the time until a batch is there."""
    training = TrainingConfig(micro_batch_size=batch_size, global_batch_size=batch_size, train_iters=_WARM_UP + steps)
    initialize_model_parallel(device=torch.device("cpu"))
    engine = Engine(configuration(dimensions, training=training))
    waited = spent = 0.0
    with closing(loader.batches()) as batches:
        for number in range(_WARM_UP + steps):
            begin = time.perf_counter()
            batch = next(batches)
            came = time.perf_counter()
            engine.train_on(batch)
            if number >= _WARM_UP:
                waited += came - begin
                spent += time.perf_counter() - begin
    destroy_model_parallel()
    return Waiting(1000 * spent / steps, waited / spent)
