"""Small checkpoints of both models, made in one process without a training run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megasnn.checkpoint.format import Progress
from megasnn.checkpoint.optimizer_state import LocalState
from megasnn.checkpoint.save import save_checkpoint
from megasnn.common.grid import Grid
from megasnn.common.random import keyed_generator
from megasnn.config.neuron import NeuronConfig
from megasnn.config.values import config_identity as identity_of
from megasnn.layers import BuildContext
from megasnn.layers.tensors import materialise, sharded_tensors
from megasnn.models.build import describe_model
from megasnn.models.description import ModelDescription
from megasnn.models.model import Model, run_config
from megasnn.models.spikformer.model import Spikformer
from megasnn.models.vgg_dvs.model import VggDvs
from megasnn.parallel.sharding import ShardedTensor
from megasnn.parallel_state import ParallelState

CPU = torch.device("cpu")
MODELS: dict[str, Model] = {
    "spikformer": Spikformer(
        embed_dim=32, depth=2, num_heads=4, mlp_ratio=2, patch_size=4, image_size=8, time_steps=2, num_classes=5
    ),
    "vgg_dvs": VggDvs(channels="8,P,8,16", image_size=8, time_steps=2, num_classes=5),
}
EXTRA = {"dataset": "digits", "seed": 3}


def identity(model: Model, neuron: str = "plif") -> dict[str, Any]:
    """The configuration as a run keeps it; parametric neurons have whole tensors with state of their own."""
    return identity_of(run_config(type(model))(model=model, neuron=NeuronConfig(neuron=neuron)))


def model_like(model: Model, neuron: str = "plif") -> ModelDescription:
    return describe_model(model, NeuronConfig(neuron=neuron).spec)


@dataclass
class Rank:
    """A rank's layers, tensors and optimizer. Initial values depend on the seed."""

    tensors: list[ShardedTensor]
    optimizer: torch.optim.AdamW


def build(
    model: ModelDescription, seed: int = 0, tensor: int = 0, size: int = 1, layers: Sequence[int] | None = None
) -> Rank:
    context = BuildContext(ParallelState.without_process_groups(Grid(tp=size), tensor))
    built = model.named_layers(context)
    built = built if layers is None else [built[index] for index in layers]
    materialise(built, CPU, seed)
    tensors = list(sharded_tensors(built))
    return Rank(tensors, torch.optim.AdamW([entry.tensor for entry in tensors if entry.is_parameter]))


def save_whole(folder: Path, model: Model, neuron: str = "plif") -> Path:
    """Saves as one rank, after one step with gradients that follow from the tensors' names."""
    described = model_like(model, neuron)
    rank = build(described)
    for entry in rank.tensors:
        if entry.is_parameter:
            entry.tensor.grad = torch.randn(entry.tensor.shape, generator=keyed_generator(entry.name))
        elif entry.tensor.is_floating_point():
            entry.tensor.normal_(generator=keyed_generator(entry.name))
    rank.optimizer.step()
    layout = {"tp": 1, "pp": 1, "dp": 1, "bounds": str(len(described.layers))}
    progress = Progress(100, 6400, model.name, identity(model, neuron), layout, EXTRA)
    return save_checkpoint(folder, progress, LocalState(rank.tensors, rank.optimizer))
