"""The Python interface of a training.

A step goes from here to the layers: Engine.train_step -> Batches.checked, rank_batch, micro_batches (batch.py) ->
Trainer.take_step (trainer.py) -> DistributedModel.run (model.py) -> PipelineExecutor.run, _forward
(pipeline/executor.py) -> PipelineChunk.forward (pipeline/chunk.py).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasnn.common.checks import context_of_error
from megasnn.common.memory import keep_free_memory
from megasnn.config import PretrainConfig
from megasnn.config.training import Length
from megasnn.data import RankBatch
from megasnn.engine.batch import BatchError, Batches
from megasnn.engine.build import (
    build_model,
    mixing_of,
    require_alike,
    require_kernels,
    run_configuration,
)
from megasnn.engine.checkpoint import Checkpoints
from megasnn.engine.evaluation import Answers, EvaluationSums
from megasnn.engine.share import SampleShare, share_of
from megasnn.engine.trainer import Trainer
from megasnn.engine.windows import describe_windows
from megasnn.models.model import Model
from megasnn.optim.rates import learning_rate, require_schedule
from megasnn.parallel.agreement import gather_in_call
from megasnn.parallel.faults import claim_fault
from megasnn.parallel.process_group import existing_state, join_ranks
from megasnn.parallel_state import (
    ParallelState,
    abandon_model_parallel,
    get_parallel_state,
    model_parallel_is_initialized,
)
from megasnn.telemetry.records import EvaluationRecord, StepResult

_open: list[Engine] = []  # at most one


class Engine:
    """A model in training on this rank: the only process, or one of torchrun's.

    Example::

        with megasnn.Engine(MyModel(width=32), micro_batch_size=8, lr=1e-3, train_iters=100) as engine:
            for images, labels in batches:
                result = engine.train_step(images, labels)
            print(result.loss, engine.evaluate(test_images, test_labels).top1)
            engine.save("checkpoints")

    A step equals `megasnn.pretrain`'s bit for bit. All methods are collective: every rank calls them in the same order
    with the whole batch, and takes its share. Where `takes_inputs` is False, a rank uses only the inputs' length, and
    without `takes_targets` only the targets' length: meta tensors suffice. A process has one open Engine at a time.

    Wrong arguments on any rank, or another method, are a ValueError on all ranks, and change nothing. Any other error
    in a step, evaluation or prediction, Ctrl-C included, ends the Engine: its methods then raise RuntimeError.

    Args:
        model: model class instance, or a validated configuration.
        lr_schedule: step, counted from 0 -> learning rate; replaces the learning rate flags.
        length: training length; by default `train_iters` or `train_samples`.
        wants_to_stop: called on every rank in each training step and evaluation batch (`distributed.stop_votes`).
        flags: command line flags, with underscores.
    Attributes:
        optimizer: over this rank's parameters or shards.
        takes_inputs: True where this rank needs input values.
        takes_targets: True where this rank needs target values.
        takes_images, takes_labels: earlier names of these two.
    Raises:
        ConfigError: contradictory flags, or a model that cannot be built.
        ValueError: no pipeline plan, another open Engine, or ranks with other flags.
    """

    def __init__(
        self,
        model: Model | PretrainConfig,
        *,
        lr_schedule: Callable[[int], float] | None = None,
        length: Length | None = None,
        wants_to_stop: Callable[[], bool] = lambda: False,
        **flags: Any,
    ) -> None:
        self.config = config = run_configuration(model, flags, lr_schedule is not None)
        # An Engine knows no epochs: an iteration counts as one.
        self.length = length = length or config.training.length(config.training.global_batch_size)
        description = describe_windows(config)
        if not config.training.evaluate_only and lr_schedule is None:
            require_schedule(config.optimizer, length.iterations, length.epoch)
        # An Engine that was never closed does not count once its grid is gone: a test or a notebook may have freed it.
        if _open and model_parallel_is_initialized() and get_parallel_state() is _open[0].state:
            raise ValueError("another Engine is open in this process: close it first (engine.close() or `with`)")
        self._closed = False
        self._failure = ""
        self.state: ParallelState
        if model_parallel_is_initialized():
            # The run or the program has joined the ranks, and leaves them.
            self.state = existing_state(config)
            self._leave: Callable[[], None] = lambda: None
        else:
            self.state, self._leave = join_ranks(config)
        _open[:] = [self]
        with ExitStack() as undo:
            # An error from here on frees the process groups.
            undo.callback(self.close)
            # Before the first collective whose number of calls follows from flags.
            require_alike(config, self.state.world)
            require_kernels(config, self.state.device)
            if self.state.device.type == "cpu":
                keep_free_memory()
            self.distributed = build_model(config, description, self.state, wants_to_stop)
            self.plan = self.distributed.plan
            self.batches = Batches(config, self.distributed, mixing_of(config, length.epoch_samples))
            rate = partial(learning_rate, config.optimizer, iterations=length.iterations, epoch=length.epoch)
            self.trainer = Trainer(config, self.distributed, lr_schedule or rate, length.iterations)
            self.optimizer = self.trainer.optimizer
            self.takes_inputs = self.distributed.takes_inputs
            self.takes_targets = self.distributed.gives_logits
            self.takes_images = self.takes_inputs
            self.takes_labels = self.takes_targets
            self.checkpoints = Checkpoints(config, self.trainer)
            # The Engine is complete: only `close` frees its process groups now.
            undo.pop_all()

    @property
    def iteration(self) -> int:
        """Optimizer steps done, with earlier runs'."""
        return self.trainer.iteration

    @property
    def consumed_samples(self) -> int:
        """The position in the training data."""
        return self.trainer.consumed_samples

    def share(self, batch: Sequence[int] | Tensor, evaluates: bool = False) -> SampleShare:
        """Samples of a global batch that this rank reads and computes. Not collective.

        Args:
            batch: sample numbers, the same on every rank.
            evaluates: for `evaluate`; at most `global_batch_size` samples.
        Raises:
            ValueError: no samples, or too many.
        """
        layout = self.batches.evaluated_layout if evaluates else self.batches.trained_layout
        return share_of(batch, layout, evaluates)

    def train_step(
        self,
        inputs: Tensor | Mapping[str, Tensor],
        targets: Tensor | None = None,
        share: SampleShare | None = None,
    ) -> StepResult:
        """Takes one optimizer step on a global batch: the same on every rank, or each rank's `share` of it.

        Args:
            inputs: tensors by name, or the only one: images `[N, C, H, W]`, or event frames `[N, T, C, H, W]`.
            targets: class indices `[N]`, probabilities `[N, classes]`, or the model's own `target`; None where the
                target is an input. CPU tensors are checked without waiting for a GPU.
            share: from `Engine.share`; inputs and targets are those of `share.indices`.
        Returns:
            loss, metrics, gradient norm and rate, the same on every rank. A step that is not finite is marked as
            skipped, and changes nothing.
        Raises:
            ValueError: a wrong batch on any rank, no steps left, or optimizer rates changed from outside.
            RuntimeError: an error has ended the Engine.
        """
        with self._running():
            problem = self.trainer.outside_change()
            checked = self.batches.checked("train_step", inputs, targets, problem=problem, share=share)
            batch = self.batches.rank_batch(checked, self.trainer.consumed_samples, share=share)
            return self.trainer.take_step(self.batches.micro_batches(batch, trains=True), batch)

    def train_on(self, batch: RankBatch) -> StepResult:
        """Takes a step on this rank's share, from `megasnn.data.BatchLoader`."""
        with self._running():
            return self.trainer.take_step(self.batches.micro_batches(batch, trains=True), batch)

    def evaluate(
        self,
        inputs: Tensor | Mapping[str, Tensor] | Iterable[Any],
        targets: Tensor | None = None,
        share: SampleShare | None = None,
    ) -> EvaluationRecord:
        """Metrics, and the loss without label smoothing, over any number of samples.

        Takes inputs and targets, with a share those of its samples; or an iterable with such pairs, with triples of
        inputs, targets and share, or with inputs, where one is the target. Uses averaged weights with `ema_decay`.
        Raises as `train_step`, and ValueError without samples.
        """
        is_batch = targets is not None or isinstance(inputs, (Tensor, Mapping)) or not isinstance(inputs, Iterable)
        pairs = inputs
        if is_batch or share is not None:
            pairs = [(inputs, targets) if share is None else (inputs, targets, share)]
        return self.evaluate_on(self.batches.of_pairs(pairs))

    def evaluate_on(self, batches: Iterable[RankBatch]) -> EvaluationRecord:
        """Evaluates this rank's shares, from `megasnn.data.BatchLoader`."""
        sums = EvaluationSums(self.distributed)
        with self._running(), self._averaged_weights():
            self._require_amplitudes()
            for batch in batches:
                self.distributed.evaluate(self.batches.micro_batches(batch, trains=False), sums.add)
            samples, loss, metrics = sums.read()
        if not samples:
            raise ValueError("there are no samples to evaluate")
        return EvaluationRecord(self.iteration, self.consumed_samples, samples, loss, metrics)

    def predict(self, inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Answers for any number of samples, in order, on every rank's CPU.

        The model's `predict` defines answers, by default the logits' mean over time, `[N, classes]`. Uses averaged
        weights with `ema_decay`.
        """
        with self._running():
            checked = self.batches.checked("predict", inputs)
            self._require_amplitudes()
            answers = Answers(self.distributed, checked.samples)
            # Each sample's index takes the place of its target, and says which row its answer fills.
            indexed = checked._replace(targets=torch.arange(checked.samples))
            with self._averaged_weights():
                for batch in self.batches.for_evaluation(indexed):
                    micro_batches = self.batches.micro_batches(batch, trains=False)
                    self.distributed.evaluate([replace(each, predicts=True) for each in micro_batches], answers.fill)
            return answers.gathered()

    def state_dict(self) -> dict[str, Tensor]:
        """Weights and buffers by global name, as unsharded copies on every rank's CPU."""
        self._agree_on_call("state_dict")
        return self.checkpoints.full_tensors()

    def load_state_dict(self, values: Mapping[str, Tensor]) -> None:
        """Loads unsharded weights and buffers by global name, from `state_dict` or `Model.from_spikingjelly`.

        Keeps optimizer state and iteration, and restarts the weights' moving average.

        Raises:
            CheckpointError: on every rank, with nothing changed: other names, shapes or types than the model's.
        """
        self._agree_on_call("load_state_dict")
        self.checkpoints.load_full_tensors(values)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes weights, optimizer state and progress to `<folder>/iter_<iteration>`, for any layout.

        All ranks use the first rank's folder. A run loads its weights by `--load` with `--finetune`, because an Engine
        does not know the data's order.

        Raises:
            CheckpointError: on every rank, when the checkpoint cannot be written.
        """
        self._agree_on_call("save")
        return self.checkpoints.save(folder)

    def load(
        self, folder: str | os.PathLike[str], step: int | None = None, weights_only: bool = False, ema: bool = True
    ) -> None:
        """Continues from an Engine's or a run's checkpoint, saved on any layout.

        All ranks use the first rank's folder. Warns about changed flags.

        Args:
            step: iteration; by default the latest intact checkpoint.
            weights_only: load weights and buffers alone, with any optimizer; the iteration stays.
            ema: with `weights_only`, load the weights' moving average, if the checkpoint has one.
        Raises:
            CheckpointError: on every rank, for no checkpoint, or another model's.
        """
        self._agree_on_call("load")
        remarks = self.checkpoints.load(folder, step, weights_only, ema)
        training = self.config.training
        if training.train_samples is not None and not weights_only:
            # The checkpoint's steps may have had another batch size.
            batch_size = training.global_batch_size
            self.set_length(training.length(batch_size, self.iteration, self.consumed_samples))
        for remark in remarks:
            warnings.warn(remark, stacklevel=2)

    def set_length(self, length: Length) -> None:
        """Sets the training length, which learning rates depend on."""
        self.length = length
        self.trainer.iterations = length.iterations

    def close(self) -> None:
        """Ends the Engine, and frees its process groups."""
        if not self._closed:
            self._closed = True
            if self in _open:
                _open.remove(self)
            self._leave()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # The first error is the one to report.
        with nullcontext() if error is None else suppress(Exception):
            self.close()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Ends the Engine at an error in the block, except a BatchError."""
        self._require_open()
        try:
            yield
        except BatchError:
            # Raised by all ranks together: the Engine goes on.
            raise
        except BaseException as error:
            # Ranks may be at different actions: the others end with the same error instead of waiting.
            if not self._failure:
                text = (str(error).splitlines() or [""])[0]
                self._failure = f"{type(error).__name__}: {text}, {context_of_error(error)}".removesuffix(", ")
                if self.state.world.size > 1:
                    claim_fault(error)
                    abandon_model_parallel()
            raise

    @contextmanager
    def _averaged_weights(self) -> Iterator[None]:
        if self.trainer.average is None:
            yield
            return
        self.trainer.exchange_average()
        try:
            yield
        except BatchError:
            self.trainer.exchange_average()
            raise
        # After another error the Engine has ended: an exchange, which is collective, would wait for ever.
        self.trainer.exchange_average()

    def _require_amplitudes(self) -> None:
        """Raises BatchError on every rank before the first step of neurons that take amplitudes from it."""
        if self.trainer.calibration.is_due():
            raise BatchError("--amplitude first-batch: take a step of training first, or load a checkpoint")

    def _agree_on_call(self, call: str) -> None:
        self._require_open()
        # Raises ValueError on every rank where one calls another method.
        gather_in_call(self.state.world.handle, call, None)

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("this Engine is closed; make another one")
        if self._failure:
            raise RuntimeError(f"this Engine has ended with an error ({self._failure}): make another one")
