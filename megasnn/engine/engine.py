"""A model with its optimizer, on this rank of a layout."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megasnn import checkpoint
from megasnn.batching import micro_batches_of
from megasnn.bundle import Bundle, logits_of
from megasnn.comm.agreement import all_do
from megasnn.config import PretrainConfig
from megasnn.config.identity import changed_recipe, identity, recipe
from megasnn.config.training import Length
from megasnn.data import GlobalBatch
from megasnn.engine.batches import Batches
from megasnn.engine.distributed_model import whole_tensors
from megasnn.engine.setup import (
    built,
    configuration,
    described_model,
    joined,
    mixing_of,
    parameter_names,
    require_alike,
    window_count,
)
from megasnn.files.problems import CheckpointError
from megasnn.grid import HOLDING_AXES
from megasnn.models.model import Model
from megasnn.non_finite import earliest
from megasnn.optim import (
    WeightAverage,
    build_optimizer,
    learning_rate,
    require_course,
    require_matches,
    state_kinds,
)
from megasnn.pipeline.costs import layers_per_chunk
from megasnn.pipeline.executor import MicroBatchInput
from megasnn.pipeline.plan import PipelinePlan
from megasnn.random import GENERATOR
from megasnn.sharding import ShardedTensor
from megasnn.telemetry.logline import EvaluationRecord, StepResult
from megasnn.telemetry.timers import Timers


class Engine:
    """A model in training, on this rank of a layout: one process by itself, or the ranks that torchrun has started.

        with megasnn.Engine(MyModel(width=32), micro_batch_size=8, lr=1e-3, train_iters=100) as engine:
            for images, labels in batches:
                result = engine.train_step(images, labels)
            print(result.loss, engine.evaluate(test_images, test_labels).top1)
            engine.save("checkpoints")

    Flags are those of the command line, with underscores: batch sizes, precision, seed, loss, neuron, optimizer and
    rates, `tensor_model_parallel_size`, `pipeline_schedule` and so on; `micro_batch_size` is part of what is computed,
    and `global_batch_size` is the usual number of samples in a step, which the pipeline is planned for. A step is bit
    for bit that of `megasnn.pretrain` with the same flags.

    All methods are collective: every rank calls them in the same order. Every rank is given the whole batch, and takes
    its share. A rank without the first stage (`takes_images` is False) only looks at the number of images, and one
    without the last stage (`takes_labels`) at that of the labels: there a tensor on the meta device will do. What is
    wrong with a batch on one rank is raised on all of them.

    Process groups that nobody has made are made here, and freed by `close`, or at the end of a `with` block.

    Args:
        model: an instance of one's own class or of one in `megasnn.MODELS`; or a whole configuration that
            `megasnn.validate` has passed.
        length: of the training; by default `train_iters` of the flags.
        plan: of the pipeline; by default measured and balanced.
        flags: values for all that the configuration leaves at its defaults.

    Attributes:
        config: with the flags in it. state: the grid of ranks.
        windows: in how many of them each sample is shown (`bptt_steps`); each is a micro-batch of the pipeline.
        iteration, consumed_samples: optimizer steps done, and training samples used.
        distributed: the model's chunks on this rank. plan: of the pipeline.
        batches: what becomes of batches on this rank.
        optimizer: of this rank's parameters. average: of its weights; None without `ema_decay`.
        timers: of the phases of a step.
    Raises:
        ConfigError: flags that do not go together, or a model that cannot be built; lists all of it.
        ValueError: patterns of flags that no parameter matches, a pipeline that cannot be planned, ranks that are laid
            out otherwise already, or that are given different flags.
    """

    def __init__(
        self,
        model: Model | PretrainConfig,
        *,
        length: Length | None = None,
        plan: PipelinePlan | None = None,
        **flags: Any,
    ) -> None:
        self.config = config = configuration(model, flags)
        self.length = length or Length(config.training.iterations or 0)
        described, self.windows = described_model(config), window_count(config)
        require_matches(config.optimizer, parameter_names(described))
        if not config.training.evaluate_only:
            require_course(config.optimizer, self.length.iterations, self.length.epoch)
        self.state, self._leave = joined(config)
        self._closed = False
        with ExitStack() as undo:
            undo.callback(self._leave)
            if config is not model:
                require_alike(config, self.state.world)
            self.plan, self.distributed = built(config, described, self.state, plan)
            self.batches = Batches(config, self.distributed, mixing_of(config, described, self.length.epoch_samples))
            groups = {axis: self.state.group(axis) for axis in HOLDING_AXES}
            self.optimizer = build_optimizer(self.distributed.tensors, config.optimizer, groups)
            decay = config.optimizer.ema_decay
            self.average = None if decay is None else WeightAverage(self.distributed.tensors, decay)
            undo.pop_all()
        waits = self.state.device.type == "cuda"
        self.timers = Timers(partial(torch.cuda.synchronize, self.state.device)) if waits else Timers()
        self.iteration = self.consumed_samples = 0

    @property
    def takes_images(self) -> bool:
        """Whether this rank has the model's first stage, and needs the values of images."""
        return self.distributed.takes_images

    @property
    def takes_labels(self) -> bool:
        """Whether this rank has the model's last stage, and needs the values of labels."""
        return self.distributed.gives_logits

    # --- training

    def train_step(self, images: Tensor, labels: Tensor) -> StepResult:
        """One optimizer step on a global batch, which is the same on every rank.

        Args:
            images: `[N, C, H, W]`, or event frames `[N, T, C, H, W]`, floating-point.
            labels: class indices `[N]`, or probabilities `[N, classes]`. Their range is looked at here: on a GPU that
                would make the host wait, so leave both on the CPU.
        Returns:
            loss, accuracy, gradient norm and rate, over the whole batch, the same on every rank. A step that is not
            finite changes nothing, and says so.
        Raises:
            ValueError: on every rank, when a batch is not what it should be on one of them, or when `train_iters` steps
                are done.
        """
        self._require_open()
        samples = self.batches.checked(images, labels, trains=True)
        return self.train_on(self.batches.share(images, labels, samples, self.consumed_samples))

    def train_on(self, batch: GlobalBatch) -> StepResult:
        """`train_step` on this rank's share of a global batch, as `megasnn.data.BatchLoader` gives it."""
        self._require_open()
        if self.iteration >= self.length.iterations:
            raise ValueError(
                f"all {self.length.iterations} steps of the training are done (train_iters); make an Engine with more"
            )
        micro_batches = self.batches.training_inputs(batch)
        with self.timers("forward_backward"):
            loss = self.distributed.forward_backward(micro_batches, batch.size)
        with self.timers("optimizer"):
            norm, rate, finite = self.update(loss, batch.size)
        where = None if finite else self._first_non_finite(micro_batches)
        self.iteration += 1
        self.consumed_samples = batch.consumed_samples
        return StepResult(loss, self.distributed.correct, batch.size, norm, rate, not finite, where)

    def update(self, loss: float, samples: int) -> tuple[float, float, bool]:
        """After forward and backward of so many samples: running statistics, clipping, weights, average of weights.

        Returns:
            the gradient's norm before clipping, the learning rate, and whether both loss and norm are finite. Where
            they are not, everything stays as it was: weights, optimizer state and running statistics.
        """
        options, distributed = self.config.optimizer, self.distributed
        norm = distributed.gradient_norm()
        rate = learning_rate(options, self.iteration, self.length.iterations, self.length.epoch)
        finite = math.isfinite(norm) and math.isfinite(loss)
        if finite:
            distributed.merge_statistics(self._most_micro_batches(samples))
            distributed.gradient_norm.clip(norm, options.clip_grad)
            for group in self.optimizer.param_groups:
                group["lr"] = rate * group["lr_scale"]
            self.optimizer.step()
            distributed.refresh_copies()
            if self.average is not None:
                self.average.update()
        return norm, rate, finite

    def _most_micro_batches(self, samples: int) -> int:
        count = -(-samples // self.config.training.micro_batch_size)
        return self.windows * len(micro_batches_of(count, self.state.data.size, 0))

    def _first_non_finite(self, micro_batches: Sequence[MicroBatchInput]) -> str | None:
        """In which layer's output it appeared first, otherwise in which gradient; collective."""
        world = self.state.world.handle
        chunk, found = self.distributed.first_non_finite_output(micro_batches) or (0, None)
        where = earliest(found, chunk, world)
        if where is not None:
            return f"not finite in forward, first in {where}"
        # Backward runs from the last chunk to the first.
        chunk, found = self.distributed.first_non_finite_gradient() or (0, None)
        where = earliest(found, -chunk, world)
        return (
            None if where is None else f"not finite in backward, first in the gradient of {where}; the step is skipped"
        )

    # --- evaluation

    def evaluate(
        self, images: Tensor | Iterable[tuple[Tensor, Tensor]], labels: Tensor | None = None
    ) -> EvaluationRecord:
        """Loss and accuracies over samples: images and labels, or an iterable of pairs of them, the same on every rank
        and as many.

        With `ema_decay` it is the average of the weights that is evaluated. Any number of samples is legal.

        Raises:
            ValueError: on every rank, as `train_step`; or there are no samples.
        """
        self._require_open()
        by_itself = labels is not None or isinstance(images, Tensor) or not isinstance(images, Iterable)
        return self.evaluate_on(self.batches.evaluated_pairs([(images, labels)] if by_itself else images))

    def evaluate_on(self, batches: Iterable[GlobalBatch]) -> EvaluationRecord:
        """`evaluate` on this rank's shares of global batches, as `megasnn.data.BatchLoader` gives them."""
        totals = [0.0, 0.0, 0.0, 0.0]
        with self.averaged_weights():
            for batch in batches:
                parts = self.distributed.evaluate(self.batches.evaluation_inputs(batch))
                totals = [a + b for a, b in zip(totals, parts, strict=True)]
            loss, samples, top1, top5 = self.distributed.total(totals)
        if not samples:
            raise ValueError("there are no samples to evaluate")
        return EvaluationRecord(
            self.iteration, self.consumed_samples, int(samples), loss / samples, top1 / samples, top5 / samples
        )

    def predict(self, images: Tensor) -> Tensor:
        """Logits `[N, classes]` of any number of images, in their order: the mean over time, on the CPU of every rank.

        With `ema_decay` they are those of the averaged weights. Raises ValueError as `train_step`.
        """
        self._require_open()
        samples = self.batches.checked(images, predicts=True)
        logits = torch.zeros(samples, self.config.model.num_classes, dtype=self.distributed.context.dtype)
        logits = logits.to(self.state.device)

        def keep(output: Bundle, places: Tensor) -> None:
            logits[places] = logits_of(output).to(logits.dtype).mean(0)

        with self.averaged_weights():
            for share in self.batches.evaluated(images, torch.arange(samples), samples):
                self.distributed.predict(self.batches.evaluation_inputs(share), keep)
        return self.distributed.of_all_replicas(logits).cpu()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Inside, the model has the average of its weights, where one is kept."""
        if self.average is None:
            yield
            return
        copies = [entry.tensor for entry in self.distributed.copies]
        kept = [copy.detach().clone() for copy in copies]
        try:
            with self.average.in_place():
                self.distributed.refresh_copies()
                yield
        finally:  # an error on one rank leaves nobody waiting for another rank's values
            with torch.no_grad():
                for copy, value in zip(copies, kept, strict=True):
                    copy.copy_(value)

    # --- weights and checkpoints

    def state_dict(self) -> dict[str, Tensor]:
        """All weights and buffers of the model, whole, by their global names: copies on the CPU of every rank."""
        self._require_open()
        return whole_tensors(self.distributed)

    def load_state_dict(self, values: Mapping[str, Tensor]) -> None:
        """Takes whole weights and buffers by global names, as `state_dict` or `Model.from_spikingjelly` gives them.

        The optimizer's state and the iteration stay; an average of the weights begins again.

        Raises:
            CheckpointError: on every rank, before anything is changed: names, shapes or types are not
                those of the model.
        """
        self._require_open()
        all_do(self.state.world.handle, partial(_require_weights, values), "load_state_dict:")
        checkpoint.load_globals_into(self.distributed.tensors, values, self.state.world.handle)
        self.distributed.refresh_copies()
        if self.average is not None:
            self.average.restart()

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes `<folder>/iter_<iteration>`: weights, optimizer and progress, for any layout.

        It is a checkpoint as runs write them. A run takes its weights by `--load` with `--finetune`: it knows nothing
        of the order of one's own data. The first rank's folder counts.

        Raises:
            CheckpointError: on every rank, when it cannot be written.
        """
        self._require_open()
        return checkpoint.save_checkpoint(
            folder,
            iteration=self.iteration,
            consumed_samples=self.consumed_samples,
            tensors=self.saved_tensors(),
            optimizer=self.optimizer,
            extra={"recipe": recipe(self.config), "generator": GENERATOR},
            config=identity(self.config),
            layout=self.layout(),
            model=self.config.model.name,
            process_group=self.state.world.handle,
        )

    def load(self, folder: str | os.PathLike[str], step: int | None = None, weights_only: bool = False) -> None:
        """Continues from a checkpoint that an Engine or a run has saved, on any layout: the latest that is intact, or
        that of iteration `step`. The first rank's folder counts. Warns of flags that are others than they were.

        Args:
            weights_only: takes weights and buffers, and begins anew with them: of a checkpoint with another optimizer,
                for another task.
        Raises:
            CheckpointError: on every rank, when there is none, or it is of another model.
        """
        self._require_open()
        continued: dict[str, Any] = (
            {}
            if weights_only
            else {
                "optimizer": self.optimizer,
                "optimizer_state": state_kinds(self.config.optimizer),
                "config": identity(self.config),
                "averages": None if self.average is None else self.average.tensors,
            }
        )
        loaded = checkpoint.load_checkpoint(
            folder,
            tensors=self.distributed.tensors,
            model=self.config.model.name,
            step=step,
            process_group=self.state.world.handle,
            **continued,
        )
        self.distributed.refresh_copies()
        if self.average is not None and (weights_only or not loaded.averaged):
            self.average.restart()
        changed = [] if weights_only else changed_recipe(loaded.extra, recipe(self.config))
        for remark in (*loaded.remarks, *changed):
            warnings.warn(remark, stacklevel=2)
        if not weights_only:
            self.iteration, self.consumed_samples = loaded.iteration, loaded.consumed_samples

    def saved_tensors(self) -> list[ShardedTensor]:
        """Parameters and buffers, and their average where one is kept."""
        return [*self.distributed.tensors, *(self.average.tensors if self.average is not None else ())]

    def layout(self) -> dict[str, object]:
        """Sizes of the grid and the cut of the model, for people who read a checkpoint."""
        grid = self.state.grid
        sizes = {"tensor": grid.tensor, "pipeline": grid.pipeline, "data": grid.data}
        return {**sizes, "virtual": len(self.distributed.chunks), "bounds": layers_per_chunk(self.plan.bounds)}

    # --- the end

    def close(self) -> None:
        """Frees the process groups that were made for this Engine, which cannot be used any more."""
        if not self._closed:
            self._closed = True
            self._leave()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("this Engine is closed; make another one")


def _require_weights(values: object) -> None:
    if not isinstance(values, Mapping):
        raise CheckpointError(f"it takes a dict of tensors by their names, got {type(values).__name__}")
