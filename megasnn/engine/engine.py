"""A model in training from Python: steps, evaluations, predictions, weights and checkpoints, on any layout."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megasnn.config import PretrainConfig
from megasnn.config.training import Length
from megasnn.data import GlobalBatch
from megasnn.engine.batch import Batches
from megasnn.engine.build import (
    built,
    described_model,
    mixing_of,
    parameter_names,
    require_kernels,
    window_count,
)
from megasnn.engine.checkpoint import Checkpoints
from megasnn.engine.configuration import configuration, require_alike
from megasnn.engine.joining import join_ranks
from megasnn.engine.step import Steps
from megasnn.engine.without_gradient import notice_of
from megasnn.free_memory import keep_free_memory
from megasnn.models.model import Model
from megasnn.optim import require_course, require_matches
from megasnn.pipeline.plan import PipelinePlan
from megasnn.telemetry.records import EvaluationRecord, StepResult
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
    wrong with an argument on one rank is raised on all of them, as a ValueError, and changes nothing. Any other error
    within a step, an evaluation or a prediction ends the Engine: whatever is asked of it then is a RuntimeError. Ctrl-C
    takes effect when the step is done.

    A process has one open Engine at a time. Process groups that nobody has made are made here, and freed by `close`, or
    at the end of a `with` block.

    Args:
        model: an instance of one's own class or of one in `megasnn.MODELS`; or a whole configuration that
            `megasnn.validate` has passed.
        length: of the training; by default `train_iters` of the flags.
        plan: of the pipeline; by default measured and balanced.
        wants_to_stop: asked on every rank in each step and each batch of an evaluation; `stop_votes` tells how many
            ranks have answered True.
        flags: values for all that the configuration leaves at its defaults.

    Attributes:
        config: with the flags in it. state: the grid of ranks. length: of the training.
        windows: in how many of them each sample is shown (`bptt_steps`); each is a micro-batch of the pipeline.
        distributed: the model's chunks on this rank. plan: of the pipeline.
        batches: what becomes of batches on this rank.
        steps: what becomes of micro-batches, with the optimizer and the average of the weights.
        checkpoints: what is saved of all that.
        setup_ms: milliseconds that this rank took to `plan` the pipeline, and to build and `materialise` its layers.
    Raises:
        ConfigError: flags that do not go together, or a model that cannot be built; lists all of it.
        ValueError: patterns of flags that no parameter matches, a pipeline that cannot be planned, another Engine that
            is open, ranks that are laid out otherwise already, or that are given different flags.
    """

    def __init__(
        self,
        model: Model | PretrainConfig,
        *,
        length: Length | None = None,
        plan: PipelinePlan | None = None,
        wants_to_stop: Callable[[], bool] = lambda: False,
        **flags: Any,
    ) -> None:
        self.config = config = configuration(model, flags)
        self.length = length or Length(config.training.train_iters or 0)
        described, self.windows = described_model(config), window_count(config)
        require_matches(config.optimizer, parameter_names(described))
        if not config.training.evaluate_only:
            require_course(config.optimizer, self.length.iterations, self.length.epoch)
        self.state, self._leave = join_ranks(config)
        self._closed = False
        with ExitStack() as undo:
            undo.callback(self._leave)
            if config is not model:
                require_alike(config, self.state.world)
            require_kernels(config, self.state.device)
            if self.state.device.type == "cpu":
                keep_free_memory()
            timers = Timers(self.state.device)
            self.plan, self.distributed = built(config, described, self.state, plan, wants_to_stop, timers)
            self.setup_ms = timers.mean_ms()
            self.batches = Batches(config, self.distributed, mixing_of(config, described, self.length.epoch_samples))
            self.steps = Steps(config, self.distributed, self.length)
            self.checkpoints = Checkpoints(config, self.steps, self.plan)
            undo.pop_all()

    @property
    def takes_images(self) -> bool:
        """Whether this rank has the model's first stage, and needs the values of images."""
        return self.distributed.takes_images

    @property
    def takes_labels(self) -> bool:
        """Whether this rank has the model's last stage, and needs the values of labels."""
        return self.distributed.gives_logits

    @property
    def iteration(self) -> int:
        """Optimizer steps done, over all runs that this one continues."""
        return self.steps.iteration

    @property
    def consumed_samples(self) -> int:
        """Training samples used; the place in the data."""
        return self.steps.consumed_samples

    @property
    def stop_votes(self) -> float:
        """How many ranks wanted to stop in the last step or batch of an evaluation, the same on every rank."""
        return self.distributed.stop_votes

    # --- training

    def train_step(self, images: Tensor, labels: Tensor) -> StepResult:
        """One optimizer step on a global batch, which is the same on every rank. The first one warns of parameters that
        got no gradient.

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
            RuntimeError: an earlier step has ended in an error.
        """
        self._require_open()
        samples = self.batches.checked(images, labels, trains=True)
        is_first = self.steps.without_gradient is None
        result = self.train_on(self.batches.share(images, labels, samples, self.consumed_samples))
        if is_first and self.steps.without_gradient and self.state.rank == 0:
            warnings.warn(notice_of(self.steps.without_gradient), stacklevel=2)
        return result

    def train_on(self, batch: GlobalBatch) -> StepResult:
        """`train_step` on this rank's share of a global batch, as `megasnn.data.BatchLoader` gives it."""
        self._require_open()
        if self.iteration >= self.length.iterations:
            raise ValueError(
                f"all {self.length.iterations} steps of the training are done (train_iters); make an Engine with more"
            )
        return self.steps.train(self.batches.training_inputs(batch), batch)

    # --- evaluation

    def evaluate(
        self, images: Tensor | Iterable[tuple[Tensor, Tensor]], labels: Tensor | None = None
    ) -> EvaluationRecord:
        """Loss and accuracies over samples: images and labels, or an iterable of pairs of them, the same on every rank
        and as many.

        With `ema_decay` it is the average of the weights that is evaluated. Any number of samples is legal.

        Raises:
            ValueError, RuntimeError: as `train_step`; ValueError also when there are no samples.
        """
        self._require_open()
        by_itself = labels is not None or isinstance(images, Tensor) or not isinstance(images, Iterable)
        return self.evaluate_on(self.batches.evaluated_pairs([(images, labels)] if by_itself else images))

    def evaluate_on(self, batches: Iterable[GlobalBatch]) -> EvaluationRecord:
        """`evaluate` on this rank's shares of global batches, as `megasnn.data.BatchLoader` gives them."""
        self._require_open()
        return self.steps.evaluate(map(self.batches.evaluation_inputs, batches))

    def predict(self, images: Tensor) -> Tensor:
        """Logits `[N, classes]` of any number of images, in their order: the mean over time, on the CPU of every rank.

        With `ema_decay` they are those of the averaged weights. Raises what `train_step` raises.
        """
        self._require_open()
        samples = self.batches.checked(images, predicts=True)
        shares = self.batches.evaluated(images, torch.arange(samples), samples)
        return self.steps.predict(map(self.batches.evaluation_inputs, shares), samples).cpu()

    # --- weights and checkpoints

    def state_dict(self) -> dict[str, Tensor]:
        """All weights and buffers of the model, whole, by their global names: copies on the CPU of every rank."""
        self._require_open()
        return self.checkpoints.whole_tensors()

    def load_state_dict(self, values: Mapping[str, Tensor]) -> None:
        """Takes whole weights and buffers by global names, as `state_dict` or `Model.from_spikingjelly` gives them.

        The optimizer's state and the iteration stay; an average of the weights begins again.

        Raises:
            CheckpointError: on every rank, before anything is changed: names, shapes or types are not
                those of the model.
        """
        self._require_open()
        self.checkpoints.take_whole(values)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes `<folder>/iter_<iteration>`: weights, optimizer and progress, for any layout.

        It is a checkpoint as runs write them. A run takes its weights by `--load` with `--finetune`: it knows nothing
        of the order of one's own data. The first rank's folder counts.

        Raises:
            CheckpointError: on every rank, when it cannot be written.
        """
        self._require_open()
        return self.checkpoints.save(folder)

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
        for remark in self.checkpoints.load(folder, step, weights_only):
            warnings.warn(remark, stacklevel=2)

    # --- the end

    def close(self) -> None:
        """Frees the process groups that were made for this Engine, which cannot be used any more."""
        if not self._closed:
            self._closed = True
            self._leave()

    def __enter__(self) -> Engine:
        self._require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with nullcontext() if error is None else suppress(Exception):  # the first error is the one to be told
            self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("this Engine is closed; make another one")
        self.steps.require_sound()
