"""A model in training from Python: steps, evaluations, predictions, weights and checkpoints, on any layout."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasnn.checkpoint.fit import model_differences
from megasnn.checkpoint.load import load_checkpoint, load_globals_into
from megasnn.checkpoint.optimizer_state import LocalState
from megasnn.checkpoint.save import save_checkpoint
from megasnn.common.bundle import Bundle
from megasnn.common.checks import context_of_error
from megasnn.common.memory import keep_free_memory
from megasnn.config import PretrainConfig
from megasnn.config.training import Length
from megasnn.config.values import changed_recipe, config_identity
from megasnn.data import GlobalBatch
from megasnn.engine.batch import BatchError, Batches
from megasnn.engine.build import (
    build_model,
    mixing_of,
    require_alike,
    require_kernels,
    run_configuration,
)
from megasnn.engine.checkpoint import Checkpoints
from megasnn.engine.step import TrainStep
from megasnn.engine.windows import describe_windows
from megasnn.models.model import Model
from megasnn.optim.rates import learning_rate, require_schedule
from megasnn.parallel.agreement import broadcast_result, gather_in_call
from megasnn.parallel.faults import claim_fault
from megasnn.parallel.process_group import join_ranks
from megasnn.parallel_state import (
    ParallelState,
    abandon_model_parallel,
    get_parallel_state,
    model_parallel_is_initialized,
)
from megasnn.telemetry.records import EvaluationRecord, StepResult

_open: list[Engine] = []  # one at most


class Engine:
    """A model in training, on this rank of a layout: one process by itself, or the ranks that torchrun has started.

        with megasnn.Engine(MyModel(width=32), micro_batch_size=8, lr=1e-3, train_iters=100) as engine:
            for images, labels in batches:
                result = engine.train_step(images, labels)
            print(result.loss, engine.evaluate(test_images, test_labels).top1)
            engine.save("checkpoints")

    A step is bit for bit that of `megasnn.pretrain`. All methods are collective: every rank calls them in the same
    order, with the whole batch, and takes its share. A rank without the first stage (`takes_images` is False) only
    looks at the number of inputs, and one without the last stage (`takes_labels`) at that of the targets: there a
    tensor on the meta device will do. A wrong argument on one rank, or another method, is a ValueError on all of them,
    and changes nothing. Any other error within a step, an evaluation or a prediction, Ctrl-C included, ends the Engine:
    whatever is asked of it then is a RuntimeError. A process has one open Engine at a time.

    Args:
        model: an instance of one's own class or of one in `megasnn.MODELS`; or a validated configuration.
        lr_schedule: (step, from 0 on) -> its learning rate, in the place of the flags of the rate.
        length: of the training; by default `train_iters` or `train_samples` of the flags.
        wants_to_stop: asked on every rank in each step and each batch of an evaluation (`distributed.stop_votes`).
        flags: those of the command line, with underscores.
    Attributes:
        config: with the flags in it. state: the grid of ranks.
        optimizer: of the parameters that this rank owns.
        takes_images, takes_labels: True where this rank needs their values.
    Raises:
        ConfigError: flags that do not go together, or a model that cannot be built; lists all of it.
        ValueError: a pipeline that cannot be planned, another open Engine, ranks of another layout or with other flags.
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
        described = describe_windows(config)
        if not config.training.evaluate_only and lr_schedule is None:
            require_schedule(config.optimizer, length.iterations, length.epoch)
        # Others may have freed the grid of one that was not closed.
        if _open and model_parallel_is_initialized() and get_parallel_state() is _open[0].state:
            raise ValueError("another Engine is open in this process: close it first (engine.close() or `with`)")
        self._closed, self._failure = False, ""
        self.state: ParallelState
        self.state, self._leave = join_ranks(config)
        _open[:] = [self]
        with ExitStack() as undo:
            undo.callback(self.close)
            require_alike(config, self.state.world)
            require_kernels(config, self.state.device)
            if self.state.device.type == "cpu":
                keep_free_memory()
            self.distributed = build_model(config, described, self.state, wants_to_stop)
            self.plan = self.distributed.plan
            self.batches = Batches(config, self.distributed, mixing_of(config, length.epoch_samples))
            rate = partial(learning_rate, config.optimizer, iterations=length.iterations, epoch=length.epoch)
            self.step = TrainStep(config, self.distributed, lr_schedule or rate, length.iterations)
            self.optimizer = self.step.optimizer
            self.takes_images, self.takes_labels = self.distributed.takes_images, self.distributed.gives_logits
            self.checkpoints = Checkpoints(config, self.step)
            undo.pop_all()

    @property
    def iteration(self) -> int:
        """Optimizer steps done, over all runs that this one continues."""
        return self.step.iteration

    @property
    def consumed_samples(self) -> int:
        """Training samples used; the position in the data."""
        return self.step.consumed_samples

    # --- training

    def train_step(self, inputs: Tensor | Mapping[str, Tensor], targets: Tensor | None = None) -> StepResult:
        """Takes one optimizer step on a global batch, which is the same on every rank.

        Args:
            inputs: by name, or the tensor of the only one: images `[N, C, H, W]`, or event frames `[N, T, C, H, W]`.
            targets: class indices `[N]`, or probabilities `[N, classes]`; or as the model's `target` says, None where
                it is one of the inputs. Leave all on the CPU: here their range is looked at.
        Returns:
            loss, metrics, gradient norm and rate, over the whole batch, the same on every rank. A step that is not
            finite changes nothing, and says so.
        Raises:
            ValueError: on every rank: a batch that is wrong on one of them, `train_iters` steps that are done, or
                learning rates of the optimizer that were changed from outside.
            RuntimeError: an earlier step has ended in an error.
        """
        with self._running():
            checked = self.batches.checked(inputs, targets, trains=True, problem=self.step.problem())
            batch = self.batches.share(*checked, self.step.consumed_samples)
            return self.step(self.batches.inputs(batch, trains=True), batch)

    def train_on(self, batch: GlobalBatch) -> StepResult:
        """`train_step` on this rank's share of a global batch, as `megasnn.data.BatchLoader` gives it."""
        with self._running():
            return self.step(self.batches.inputs(batch, trains=True), batch)

    # --- evaluation

    def evaluate(
        self, inputs: Tensor | Mapping[str, Tensor] | Iterable[Any], targets: Tensor | None = None
    ) -> EvaluationRecord:
        """Computes loss, without label smoothing, and metrics over any number of samples.

        They are inputs and targets, or an iterable of pairs of them (of inputs alone, where one is the target), the
        same on every rank. With `ema_decay` the weights are the averaged ones. Raises what `train_step` raises, and
        ValueError where there are no samples."""
        by_itself = targets is not None or isinstance(inputs, (Tensor, Mapping)) or not isinstance(inputs, Iterable)
        return self.evaluate_on(self.batches.evaluated_pairs([(inputs, targets)] if by_itself else inputs))

    def evaluate_on(self, batches: Iterable[GlobalBatch]) -> EvaluationRecord:
        """`evaluate` on this rank's shares of global batches, as `megasnn.data.BatchLoader` gives them."""
        distributed, task = self.distributed, self.distributed.description.task
        totals = torch.zeros(2 + len(task.evaluated), dtype=torch.float64, device=self.state.device)

        def count(output: Bundle, targets: Tensor) -> None:
            totals[0] += distributed.loss.of_evaluation(output, targets)
            totals[1] += len(targets)
            totals[2:] += task.sums(output, targets, task.evaluated)

        with self._running(), self._averaged_weights():
            for batch in batches:
                distributed.evaluate(self.batches.inputs(batch, trains=False), count)
            loss, samples, *sums = distributed.of_all_replicas(totals).tolist()
        if not samples:
            raise ValueError("there are no samples to evaluate")
        metrics = {name: each / samples for name, each in zip(task.evaluated, sums, strict=True)}
        return EvaluationRecord(self.iteration, self.consumed_samples, int(samples), loss / samples, metrics)

    def predict(self, inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Returns what the model's `predict` gives for any number of samples, in their order, on the CPU of every rank:
        by default the mean over time of the logits, `[N, classes]`. With `ema_decay` the weights are the averaged ones.
        """
        with self._running():
            named, _, samples = self.batches.checked(inputs, predicts=True)
            task, dtype = self.distributed.description.task, self.distributed.context.numerics.dtype
            answers = torch.zeros_like(task.answer.empty(samples, dtype), device=self.state.device)

            def keep(output: Bundle, positions: Tensor) -> None:
                answers[positions] = task.answers_of(output).to(answers.dtype)

            with self._averaged_weights():  # and places in the targets' stead
                for batch in self.batches.evaluated(named, torch.arange(samples), samples):
                    self.distributed.evaluate(self.batches.inputs(batch, trains=False), keep)
            return self.distributed.of_all_replicas(answers).cpu()

    @contextmanager
    def _averaged_weights(self) -> Iterator[None]:
        """Puts the average of the weights, where one is kept, in their place inside the block."""
        if self.step.average is None:
            yield
            return
        self.step.exchange_average()
        try:
            yield
        except BatchError:
            self.step.exchange_average()
            raise
        self.step.exchange_average()

    # --- weights and checkpoints

    def state_dict(self) -> dict[str, Tensor]:
        """Returns all weights and buffers of the model, whole, by global name: copies on the CPU of every rank."""
        self._begin("state_dict")
        return self.checkpoints.full_tensors()

    def load_state_dict(self, values: Mapping[str, Tensor]) -> None:
        """Takes whole weights and buffers by global names, as `state_dict` or `Model.from_spikingjelly` gives them. The
        optimizer's state and the iteration stay; an average of the weights begins again.

        Raises:
            CheckpointError: on every rank, before anything is changed: names, shapes or types are not the model's.
        """
        self._begin("load_state_dict")
        load_globals_into(self.distributed.tensors, values, self.state.world.handle)
        self.step.loaded()

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes `<folder>/iter_<iteration>`: weights, optimizer and progress, for any layout. The first rank's folder
        counts. A run takes the weights by `--load` with `--finetune`: it knows nothing of the order of one's own data.

        Raises:
            CheckpointError: on every rank, when it cannot be written.
        """
        self._begin("save")
        path = broadcast_result(self.state.world.handle, lambda: Path(folder))
        return save_checkpoint(path, self.checkpoints.progress({}), self.checkpoints.state, self.state.world.handle)

    def load(
        self, folder: str | os.PathLike[str], step: int | None = None, weights_only: bool = False, ema: bool = True
    ) -> None:
        """Continues from a checkpoint that an Engine or a run has saved, on any layout: the latest that is intact, or
        that of iteration `step`. The first rank's folder counts. Warns of flags that are others than they were. With
        `weights_only` it begins anew with weights and buffers, of a checkpoint with another optimizer, too: with their
        average where there is one, without `ema` never.

        Raises:
            CheckpointError: on every rank, when there is none, or it is of another model.
        """
        self._begin("load")
        world, config = self.state.world.handle, self.config
        into = LocalState(self.distributed.tensors) if weights_only else self.checkpoints.state
        expected = None if weights_only else config_identity(config)
        check = partial(model_differences, model=config.model.name, config=expected)
        loaded = load_checkpoint(
            folder, into, step=step, process_group=world, check=check, average=weights_only and ema
        )
        if weights_only:
            self.step.loaded()
        else:
            self.step.loaded((loaded.iteration, loaded.consumed_samples), loaded.averaged_steps)
            self._follow_position()
        changed = [] if weights_only else changed_recipe(loaded.extra, config)
        for remark in (*loaded.remarks, *changed):
            warnings.warn(remark, stacklevel=2)

    def _follow_position(self) -> None:
        """Ends the training after `train_samples`, whatever batch size the steps of the checkpoint had."""
        training = self.config.training
        if training.train_samples is not None:
            self.length = training.length(training.global_batch_size, self.iteration, self.consumed_samples)
            self.step.iterations = self.length.iterations

    # --- the end

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Ends the Engine with an error in the block, since the ranks are no longer at the same action; the others are
        told, so that they do not wait. A batch that all ranks have refused together ends nothing."""
        self._require_open()
        try:
            yield
        except BatchError:
            raise
        except BaseException as error:
            if not self._failure:
                text = (str(error).splitlines() or [""])[0]
                self._failure = f"{type(error).__name__}: {text}, {context_of_error(error)}".removesuffix(", ")
                if self.state.world.size > 1:
                    claim_fault(error)
                    abandon_model_parallel()
            raise

    def close(self) -> None:
        """Frees the process groups that were made for this Engine, which cannot be used any more."""
        if not self._closed:
            self._closed = True
            if self in _open:
                _open.remove(self)
            self._leave()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with nullcontext() if error is None else suppress(Exception):  # the first error is the one to be reported
            self.close()

    def _begin(self, call: str) -> None:
        """Begins a method that every rank calls. Raises ValueError on every rank where one calls another."""
        self._require_open()
        gather_in_call(self.state.world.handle, call, None)

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("this Engine is closed; make another one")
        if self._failure:
            raise RuntimeError(f"this Engine has ended with an error ({self._failure}): make another one")
