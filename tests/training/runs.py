"""Whole runs of the training loop inside the ranks of a test."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megasnn.checkpoint.load import load_global_tensors
from megasnn.config import parse, validate
from megasnn.config.data import NO_DATASETS, GivenDatasets
from megasnn.models.description import ModelDescription
from megasnn.models.model import run_config
from megasnn.models.registry import MODELS
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline import plan
from megasnn.pipeline.cost_model import LayerCost, LinkCost, PipelineCosts
from megasnn.pretraining import with_datasets
from megasnn.telemetry.callback import Callback
from megasnn.training import memory
from megasnn.training.loop import TrainingRun

TINY = (
    "--image-size 8 --in-channels 1 --num-classes 10 --patch-size 4 --embed-dim 32 --depth 1 --num-heads 4 "
    "--time-steps 2 --mlp-ratio 2 --micro-batch-size 4 --global-batch-size 10 --num-workers 0 --lr 1e-2 --eval-iters 2"
).split()
TINY_VGG = (
    "--channels 4,P,8,8,P --image-size 16 --time-steps 3 --num-classes 10 --dropout 0.4 --micro-batch-size 4 "
    "--global-batch-size 10 --num-workers 0 --lr 1e-2 --eval-iters 0"
).split()


@dataclass
class Outcome:
    """How far a run came, and all tensors at its end."""

    iteration: int
    consumed_samples: int
    tensors: dict[str, Tensor]


def train(cache: str, *flags: str, only_load: bool = False, callbacks: Sequence[Callback] = ()) -> Outcome:
    """On every rank of an initialised world, or in a process by itself."""
    os.environ["MEGASNN_CACHE"] = cache
    return train_model("spikformer", [*TINY, *flags], only_load, callbacks)


def train_vgg(*flags: str) -> Outcome:
    """The same for the VGG, on shards among the flags."""
    return train_model("vgg_dvs", [*TINY_VGG, *flags])


def train_model(
    model: str,
    flags: list[str],
    only_load: bool = False,
    callbacks: Sequence[Callback] = (),
    given: GivenDatasets = NO_DATASETS,
) -> Outcome:
    """The same for any model of the table, without flags of its own."""
    config = parse(run_config(MODELS[model]), flags)
    config, given = with_datasets(config, given)
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    validate(config, world)
    parallel = config.parallel
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    finer = {"dp_shard": parallel.weight_parallel_size, "cp": parallel.context_parallel_size}
    state = initialize_model_parallel(tp=tensor, pp=pipeline, **finer)
    try:
        run = TrainingRun(config, state, callbacks=callbacks, given=given)
        try:
            if not only_load:
                run.train()
        except Exception:
            if world == 1:  # as the program does: of several, the others still work on it
                run.close()
            raise
        outcome = Outcome(run.engine.iteration, run.engine.consumed_samples, run.engine.state_dict())
        run.close()
        return outcome
    finally:
        destroy_model_parallel()


@contextmanager
def without_trial() -> Iterator[None]:
    """Inside, no layer runs before the training does: none is tried out to see what memory or time it needs.

    A pipeline is cut and scheduled as if all layers took the same time.
    """

    def alike(model: ModelDescription, *_: object) -> PipelineCosts:
        return PipelineCosts(tuple(LayerCost(1, 1, 1) for _ in model.layers), LinkCost())

    with mock.patch.object(memory, "count_memory", alike), mock.patch.object(plan, "pipeline_costs", alike):
        yield


def log_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of this kind in the log of a run."""
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def saved(folder: Path, step: int | None = None) -> dict[str, Tensor]:
    """All tensors of the checkpoint of a step, by default the newest, the optimizer's among them."""
    return load_global_tensors(folder, step, with_optimizer=True)


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Whether the same tensors differ by rounding in float64 only."""
    return ours.keys() == theirs.keys() and all(
        (ours[name].double() - theirs[name].double()).norm() <= 1e-9 * theirs[name].double().norm() for name in theirs
    )
