"""What is kept of a model in training: checkpoints for any layout, and its whole weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megasnn import checkpoint
from megasnn.checkpoint.format import BESIDE
from megasnn.checkpoint.load import model_differences
from megasnn.config import PretrainConfig
from megasnn.config.identity import changed_recipe, identity, recipe
from megasnn.engine.steps import Steps
from megasnn.files import CheckpointError
from megasnn.parallel.agreement import gather, run_on_all_ranks
from megasnn.parallel.sharding import Piece, ShardedTensor
from megasnn.pipeline.cost_model import layers_per_chunk
from megasnn.pipeline.plan import PipelinePlan
from megasnn.random import GENERATOR


class Checkpoints:
    """Checkpoints and whole weights of an Engine; its methods are collective.

    Raises:
        ValueError: a layer has a name that checkpoints keep for something else.
    Attributes:
        state: what this rank holds of a checkpoint.
    """

    def __init__(self, config: PretrainConfig, steps: Steps, plan: PipelinePlan) -> None:
        self._config, self._steps, self._plan = config, steps, plan
        self._distributed, self._world = steps.distributed, steps.distributed.state.world
        if refused := [entry.name for entry in self._distributed.tensors if entry.name.startswith(BESIDE)]:
            raise ValueError(f"{refused[0]}: names that begin with {' or '.join(BESIDE)} are not for layers")
        averages = steps.average.tensors if steps.average is not None else None
        self.state = checkpoint.LocalState(
            self._distributed.tensors, steps.optimizer, self._distributed.owned, averages
        )

    def entries(self) -> list[ShardedTensor]:
        """All tensors that this rank holds of what is in a checkpoint: parameters whole, and the optimizer's state so
        far."""
        whole = {entry.name: entry for entry in self._distributed.tensors}
        return [whole.get(entry.name, entry) for entry in self.state.entries()]

    def layout(self) -> dict[str, object]:
        """Sizes of the grid and the cut of the model, for people who read a checkpoint."""
        grid = self._distributed.state.grid
        sizes = {"tensor": grid.tensor, "pipeline": grid.pipeline, "data": grid.replicas, "weight": grid.weight}
        sizes["context"] = grid.context
        return {**sizes, "virtual": len(self._distributed.chunks), "bounds": layers_per_chunk(self._plan.bounds)}

    def save(self, folder: object) -> Path:
        """Writes a checkpoint into the folder that the first rank is given; see `Engine.save`."""
        progress = checkpoint.Progress(
            self._steps.iteration,
            self._steps.consumed_samples,
            self._config.model.name,
            identity(self._config),
            self.layout(),
            {"recipe": recipe(self._config), "generator": GENERATOR},
        )
        path = checkpoint.broadcast_result(self._world.handle, partial(_folder, folder))
        return checkpoint.save_checkpoint(path, progress, self.state, self._world.handle)

    def load(self, folder: object, step: object, weights_only: bool) -> list[str]:
        """Takes a checkpoint of the folder that the first rank is given; see `Engine.load`. Returns what the user
        should know about it."""
        path, iteration = checkpoint.broadcast_result(self._world.handle, lambda: (_folder(folder), _iteration(step)))
        model, config = self._config.model.name, None if weights_only else identity(self._config)
        loaded = checkpoint.load_checkpoint(
            path,
            checkpoint.LocalState(self._distributed.tensors) if weights_only else self.state,
            step=iteration,
            process_group=self._world.handle,
            check=lambda saved: model_differences(saved, model, config),
        )
        if weights_only:
            self._steps.loaded()
            return [*loaded.remarks]
        self._steps.loaded((loaded.iteration, loaded.consumed_samples), loaded.averaged)
        return [*loaded.remarks, *changed_recipe(loaded.extra, recipe(self._config))]

    def take_whole(self, values: Mapping[str, Tensor]) -> None:
        """Takes whole weights and buffers, which every rank is given; see `Engine.load_state_dict`."""
        run_on_all_ranks(self._world.handle, partial(_require_weights, values), "load_state_dict:")
        checkpoint.load_globals_into(self._distributed.tensors, values, self._world.handle)
        self._steps.loaded()

    def whole_tensors(self) -> dict[str, Tensor]:
        """All parameters and buffers of the model, whole, by name: copies on the CPU of every rank."""
        mine = {entry.name: entry for entry in self._distributed.tensors if entry.shard.is_primary()}
        whole = {}
        for described in self._distributed.described:
            held: list[tuple[Piece, Tensor]] = []
            if (entry := mine.get(described.name)) is not None:
                held = [(piece, piece.of_local(entry.tensor.detach()).cpu()) for piece in entry.shard.pieces()]
            value = torch.empty(described.shard.global_shape, dtype=described.tensor.dtype)
            for piece, part in (each for rank in gather(self._world.handle, held) for each in rank):
                piece.of_global(value).copy_(part)
            whole[described.name] = value
        return whole


def _folder(given: object) -> Path:
    if not isinstance(given, (str, os.PathLike)) or not isinstance(os.fspath(given), str):
        raise CheckpointError(f"the folder of checkpoints must be a text or a pathlib.Path, got {given!r}")
    if not os.fspath(given).strip():
        raise CheckpointError(f"the folder of checkpoints has no name, got {given!r}; '.' is the current folder")
    return Path(given)


def _iteration(step: object) -> int | None:
    if step is None or (isinstance(step, int) and not isinstance(step, bool)):
        return step
    raise CheckpointError(f"step must be the iteration of a checkpoint, a whole number, got {step!r}")


def _require_weights(values: object) -> None:
    if not isinstance(values, Mapping):
        raise CheckpointError(f"it takes a dict of tensors by their names, got {type(values).__name__}")
