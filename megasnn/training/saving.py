"""Where a run starts from and what it saves: the run's side of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megasnn import checkpoint
from megasnn.config import PretrainConfig, to_dict
from megasnn.engine import Engine
from megasnn.parallel_state import ParallelState
from megasnn.training.setup import ModelProvider


@dataclass(frozen=True)
class StartingPoint:
    """
    Attributes:
        iteration, consumed_samples: done before; 0 at the beginning.
        notice: what the user should know about it; "" where it is as asked for.
    """

    iteration: int = 0
    consumed_samples: int = 0
    notice: str = ""


class Saves:
    """Checkpoints of one run.

    Args:
        model_config: the model's part of the configuration, which later runs are compared with.
        dataset: fingerprint of the training data.
        layout: layers of each chunk, for people who read the checkpoint.
    """

    def __init__(
        self,
        config: PretrainConfig,
        model_config: object,
        provider: ModelProvider,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        state: ParallelState,
        dataset: object,
        layout: str,
    ) -> None:
        self._options, self._provider, self._engine, self._state = config.checkpoint, provider, engine, state
        self._optimizer, self._layout = optimizer, layout
        self._identity = _identity(config, model_config)
        # A place in the data means something only in the same data and order.
        self._data_identity: dict[str, object] = {
            "dataset": dataset,
            "seed": config.training.seed,
            "shuffle": config.data.shuffle,
        }
        self._saved_at: int | None = None

    def load(self) -> StartingPoint:
        """Fills the engine from a checkpoint or SpikingJelly's weights; otherwise its keyed initial values stay."""
        if self._options.load_spikingjelly:
            weights = self._provider.from_spikingjelly(checkpoint.read_state_dict(self._options.load_spikingjelly))
            checkpoint.load_globals_into(self._engine.tensors, weights, self._state.world.handle)
        elif self._options.load:
            return self._load_checkpoint(self._options.load)
        return StartingPoint()

    def _load_checkpoint(self, folder: str) -> StartingPoint:
        options = self._options
        try:
            loaded = checkpoint.load_checkpoint(
                folder,
                tensors=self._engine.tensors,
                optimizer=None if options.finetune or options.no_load_optim else self._optimizer,
                config=None if options.finetune else self._identity,
                step=options.ckpt_step,
                process_group=self._state.world.handle,
                refuse=self._other_data,
            )
        except checkpoint.NoCheckpointError:
            if not self._may_begin_anew():
                raise
            return StartingPoint(notice=f"no checkpoint in {folder}: starting from the beginning")
        notice = "\n".join(f"WARNING: {remark}" for remark in loaded.remarks)
        if options.finetune:
            return StartingPoint(notice=notice)
        return StartingPoint(loaded.iteration, loaded.consumed_samples, notice)

    def _may_begin_anew(self) -> bool:
        """A job that saves where it loads finds nothing there the first time; a folder named by mistake is refused."""
        options = self._options
        explicit = options.exit_on_missing_checkpoint or options.finetune or options.ckpt_step is not None
        return not explicit and options.load == options.save

    def _other_data(self, saved: checkpoint.Metadata) -> Iterator[str]:
        """Where the data or its order is not what the checkpoint's place in it refers to."""
        if self._options.finetune:
            return
        for name, value in self._data_identity.items():
            if saved.extra.get(name) != value:
                yield (
                    f"{name}: {saved.extra.get(name)} when it was saved, {value} now: in other data or another order "
                    "its place in the data means nothing (--finetune takes its weights only)"
                )

    def save(self, iteration: int, consumed_samples: int) -> Path | None:
        """Saves unless this iteration is saved already; the folder it is in. Collective."""
        folder = self._options.save
        if folder is None or self._saved_at == iteration:
            return None
        grid = self._state.grid
        path = checkpoint.save_checkpoint(
            folder,
            iteration=iteration,
            consumed_samples=consumed_samples,
            tensors=self._engine.tensors,
            optimizer=self._optimizer,
            extra=self._data_identity,
            config=self._identity,
            layout={
                "tensor": grid.tensor,
                "pipeline": grid.pipeline,
                "data": grid.data,
                "bounds": self._layout,
            },
            is_writer=self._state.data.rank == 0,
            process_group=self._state.world.handle,
        )
        self._saved_at = iteration
        return path


def _identity(config: PretrainConfig, model_config: object) -> dict[str, dict[str, object]]:
    """What makes two models the same: dimensions, whatever the variant is called, and neuron, whatever its backend."""
    model, neuron = dict(to_dict(model_config)), dict(to_dict(config.neuron))
    model.pop("variant", None)
    neuron.pop("neuron_backend")
    return {"model": model, "neuron": neuron}
