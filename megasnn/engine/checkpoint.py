"""Save and load for an Engine: its model, optimizer, position and counters."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from megasnn.checkpoint.fit import model_differences
from megasnn.checkpoint.format import AVERAGED_STEPS, BESIDE, Progress
from megasnn.checkpoint.load import load_checkpoint, load_globals_into
from megasnn.checkpoint.optimizer_state import LocalState
from megasnn.checkpoint.save import save_checkpoint
from megasnn.config import PretrainConfig
from megasnn.config.values import changed_recipe, config_identity, recipe
from megasnn.engine.trainer import Trainer
from megasnn.parallel.agreement import broadcast_result, gather
from megasnn.parallel.sharding import ShardedTensor
from megasnn.pipeline.cost_model import layers_per_chunk


class Checkpoints:
    """An Engine's checkpoints: contents, saving and loading. All methods but `progress` are collective.

    Raises:
        ValueError: a layer name that checkpoints use for other tensors.
    """

    def __init__(self, config: PretrainConfig, trainer: Trainer) -> None:
        self._config = config
        self._trainer = trainer
        self._distributed = trainer.distributed
        for entry in self._distributed.tensors:
            if entry.name.startswith(BESIDE):
                raise ValueError(f"{entry.name}: names that begin with {' or '.join(BESIDE)} are not for layers")
        averages = None
        if trainer.average is not None:
            averages = trainer.average.tensors
        self.state = LocalState(self._distributed.tensors, trainer.optimizer, self._distributed.owned, averages)

    def whole_entries(self) -> list[ShardedTensor]:
        """This rank's tensors and optimizer state; with ZeRO-1 whole parameters in place of their shards."""
        whole = {entry.name: entry for entry in self._distributed.tensors}
        return [whole.get(entry.name, entry) for entry in self.state.entries()]

    def progress(self, extra: Mapping[str, object], skipped_steps: int = 0) -> Progress:
        """Position, model, layout for readers, and `extra`."""
        grid = self._distributed.state.grid
        layout = {
            "tp": grid.tp,
            "pp": grid.pp,
            "dp": grid.replicas,
            "dp_shard": grid.dp_shard,
            "cp": grid.cp,
            "virtual": len(self._distributed.chunks),
            "bounds": layers_per_chunk(self._distributed.plan.bounds),
        }
        beside: dict[str, object] = {"recipe": recipe(self._config)}
        if self._trainer.average is not None:
            beside[AVERAGED_STEPS] = self._trainer.average.steps
        return Progress(
            self._trainer.iteration,
            self._trainer.consumed_samples,
            self._config.model.name,
            config_identity(self._config),
            layout,
            {**beside, **extra},
            skipped_steps,
        )

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """See `Engine.save`."""
        world = self._distributed.state.world.handle
        path = broadcast_result(world, lambda: Path(folder))
        return save_checkpoint(path, self.progress({}), self.state, world)

    def load(
        self, folder: str | os.PathLike[str], step: int | None, weights_only: bool, average: bool
    ) -> Sequence[str]:
        """See `Engine.load`. Returns remarks for the user.

        Args:
            average: with `weights_only`, load the weights' moving average, if the checkpoint has one.
        """
        into = LocalState(self._distributed.tensors) if weights_only else self.state
        expected = None if weights_only else config_identity(self._config)
        loaded = load_checkpoint(
            folder,
            into,
            step=step,
            process_group=self._distributed.state.world.handle,
            check=partial(model_differences, model=self._config.model.name, config=expected),
            average=weights_only and average,
        )
        if weights_only:
            self._trainer.after_loading()
            return loaded.remarks
        self._trainer.after_loading((loaded.iteration, loaded.consumed_samples), loaded.averaged_steps)
        # A continued run may change its recipe; each change is reported.
        return [*loaded.remarks, *changed_recipe(loaded.extra, self._config)]

    def load_full_tensors(self, values: Mapping[str, Tensor]) -> None:
        """See `Engine.load_state_dict`."""
        load_globals_into(self._distributed.tensors, values, self._distributed.state.world.handle)
        self._trainer.after_loading()

    def full_tensors(self) -> dict[str, Tensor]:
        """See `Engine.state_dict`."""
        mine = {entry.name: entry for entry in self._distributed.tensors if entry.shard.is_primary()}
        full = {}
        # One tensor at a time: the ranks' parts of the whole model at once would double the memory.
        for described in self._distributed.description.tensors:
            own = []
            if described.name in mine:
                entry = mine[described.name]
                own = [(piece, piece.of_local(entry.tensor.detach()).cpu()) for piece in entry.shard.pieces()]
            parts = list(chain(*gather(self._distributed.state.world.handle, own)))
            _, first = parts[0]
            value = torch.empty(described.shard.global_shape, dtype=first.dtype)
            for piece, part in parts:
                piece.of_global(value).copy_(part)
            full[described.name] = value
        return full
