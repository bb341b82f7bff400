"""Contents of the checkpoints of a model in training, for any layout, and its full weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megasnn.checkpoint.format import AVERAGED_STEPS, BESIDE, Progress
from megasnn.checkpoint.optimizer_state import LocalState
from megasnn.config import PretrainConfig
from megasnn.config.values import config_identity, recipe
from megasnn.engine.step import TrainStep
from megasnn.parallel.agreement import gather
from megasnn.parallel.sharding import ShardedTensor
from megasnn.pipeline.cost_model import layers_per_chunk


class Checkpoints:
    """Contents of an Engine's checkpoints; `state` is what this rank holds of them. Raises ValueError for a layer whose
    name checkpoints keep for something else."""

    def __init__(self, config: PretrainConfig, step: TrainStep) -> None:
        self._config, self._step, self._distributed = config, step, step.distributed
        if refused := [entry.name for entry in self._distributed.tensors if entry.name.startswith(BESIDE)]:
            raise ValueError(f"{refused[0]}: names that begin with {' or '.join(BESIDE)} are not for layers")
        averages = None if step.average is None else step.average.tensors
        self.state = LocalState(self._distributed.tensors, step.optimizer, self._distributed.owned, averages)

    def entries(self) -> list[ShardedTensor]:
        """Tensors that this rank holds of a checkpoint, parameters whole, with the optimizer's state so far."""
        whole = {entry.name: entry for entry in self._distributed.tensors}
        return [whole.get(entry.name, entry) for entry in self.state.entries()]

    def progress(self, extra: Mapping[str, object], skipped_steps: int = 0) -> Progress:
        """Returns what is written beside the tensors: position, model, layout for people, and `extra`."""
        grid, distributed = self._distributed.state.grid, self._distributed
        sizes = {"tp": grid.tp, "pp": grid.pp, "dp": grid.replicas, "dp_shard": grid.dp_shard, "cp": grid.cp}
        chunks = {"virtual": len(distributed.chunks), "bounds": layers_per_chunk(distributed.plan.bounds)}
        steps = {} if self._step.average is None else {AVERAGED_STEPS: self._step.average.steps}
        return Progress(
            self._step.iteration,
            self._step.consumed_samples,
            self._config.model.name,
            config_identity(self._config),
            {**sizes, **chunks},
            {"recipe": recipe(self._config), **steps, **extra},
            skipped_steps,
        )

    def full_tensors(self) -> dict[str, Tensor]:
        """See `Engine.state_dict`. Collective."""
        mine = {entry.name: entry for entry in self._distributed.tensors if entry.shard.is_primary()}
        full = {}
        for described in self._distributed.description.tensors:
            entries = [mine[described.name]] if described.name in mine else []
            held = [(p, p.of_local(entry.tensor.detach()).cpu()) for entry in entries for p in entry.shard.pieces()]
            parts = [each for rank in gather(self._distributed.state.world.handle, held) for each in rank]
            full[described.name] = value = torch.empty(described.shard.global_shape, dtype=parts[0][1].dtype)
            for piece, part in parts:
                piece.of_global(value).copy_(part)
        return full
