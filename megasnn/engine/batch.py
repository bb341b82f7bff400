"""Checks of a global batch, and its micro-batches for this rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megasnn.augment.mixing import Mixing
from megasnn.common.files import quantity
from megasnn.common.grid import micro_batch_counts, micro_batch_sizes
from megasnn.common.memory import copy_without_waiting
from megasnn.config import PretrainConfig
from megasnn.config.training import LOSSES
from megasnn.data import BatchShare, MicroBatch, RankBatch
from megasnn.engine.model import DistributedModel
from megasnn.engine.share import SampleShare, share_problem
from megasnn.engine.windows import windows_of
from megasnn.layers.token_context import own_tokens
from megasnn.models.arrays import not_finite
from megasnn.models.task import task_of
from megasnn.parallel.agreement import gather_in_call, sum_over_ranks
from megasnn.parallel.sharding import own_span
from megasnn.pipeline.microbatch_state import MicroBatchInput

Call = Literal["train_step", "evaluate", "predict"]
"""The Engine's method that a batch is for."""


class BatchError(ValueError):
    """Refused on all ranks, with nothing changed."""


class CheckedBatch(NamedTuple):
    """A valid batch: inputs by name, targets, and the number of samples on all ranks.

    With a `SampleShare`, tensors have this rank's samples only.
    """

    inputs: Mapping[str, Tensor]
    targets: Tensor
    samples: int


class Batches:
    """Cuts whole batches, the same on every rank, into this rank's micro-batches. Construction is collective.

    Args:
        mixing: mixup or CutMix within each training micro-batch; None for neither.
    """

    def __init__(self, config: PretrainConfig, distributed: DistributedModel, mixing: Mixing | None) -> None:
        self._config = config
        self._mixing = mixing
        self._state = distributed.state
        self._dtype = distributed.context.numerics.dtype
        self._windows = config.windows
        self._takes_inputs = distributed.takes_inputs
        self._takes_targets = distributed.gives_logits
        self._task = task_of(config.model)
        self._takes_soft = self._task.loss is None and LOSSES[config.training.loss].mixes and mixing is None
        self._sample_group = sample_group = distributed.context.sample_group
        self._tokens = distributed.context.token_group
        self.evaluated_layout = BatchShare(
            config.training.global_batch_size,
            config.training.micro_batch_size,
            dp_size=distributed.state.dp.size,
            dp_rank=distributed.state.dp.rank,
            cp_size=sample_group.size,
            cp_rank=sample_group.rank,
            inputs=self._takes_inputs,
            targets=self._takes_targets,
        )
        self.trained_layout = self.evaluated_layout
        if mixing is not None:
            # Mixing needs the whole micro-batch.
            self.trained_layout = replace(self.evaluated_layout, cp_size=1, cp_rank=0)
        # A norm without running statistics uses the batch's own in evaluation too, and padding would change them.
        without_running = sum(norm.running_mean is None for norm in distributed.norms)
        world = distributed.state.world.handle
        self._evaluates_padding = sample_group.size == 1 or sum_over_ranks(world, [without_running]) == [0]

    def checked(
        self,
        call: Call,
        inputs: Any,
        targets: Any = None,
        problem: str | None = None,
        share: SampleShare | None = None,
    ) -> CheckedBatch:
        """A valid batch. Collective.

        Args:
            call: "predict" takes no targets.
            problem: the caller's own error on this rank.
            share: the batch has this rank's samples only.
        Raises:
            BatchError: on every rank, for a problem on any, or different sample numbers.
        """
        names = list(self._task.inputs)
        named = inputs
        if len(names) == 1 and not isinstance(inputs, Mapping):
            named = {names[0]: inputs}
        if share is not None:
            problem = problem or share_problem(share, trains=call == "train_step")
        has_values = not problem and (share is None or bool(share.indices))
        if has_values:
            problem = self._problem(call, named, targets, share)
        samples = 0
        if not problem:
            samples = len(named[names[0]]) if share is None else share.samples
        self._agree(call, problem or samples)
        if isinstance(self._task.target, str) and has_values:
            targets = named[self._task.target]
        return CheckedBatch(named, targets, samples)

    def _agree(self, call: Call, problem_or_samples: str | int) -> None:
        """Raises BatchError on every rank for a problem on any, or different sample numbers.

        Args:
            problem_or_samples: this rank's problem, or its number of samples, 0 after the last batch.
        """
        try:
            # A single rank's error would leave the others waiting.
            of_ranks = gather_in_call(self._state.world.handle, call, problem_or_samples)
        except ValueError as error:
            raise BatchError(str(error)) from None
        problems = [each for each in dict.fromkeys(of_ranks) if isinstance(each, str)]
        if problems:
            raise BatchError("; ".join(problems))
        if len(set(of_ranks)) > 1:
            raise BatchError(f"ranks have different numbers of samples (0 after the last batch): {of_ranks}")

    def _problem(self, call: Call, inputs: Any, targets: Any, share: SampleShare | None) -> str | None:
        task = self._task
        if not isinstance(inputs, Mapping) or inputs.keys() != task.inputs.keys():
            got = ", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else type(inputs).__name__
            return f"the model takes a dict of its inputs, {', '.join(task.inputs)}, and got {got}"
        samples = 0 if share is None else len(share.indices)
        for name, spec in task.inputs.items():
            uses_values = self._takes_inputs or (name == task.target and self._takes_targets)
            problem = spec.problem(name, inputs[name], samples or None, uses_values)
            if problem:
                return problem
            samples = len(inputs[name])
        problem = self._target_problem(call, targets, samples)
        if problem:
            return problem
        if call != "train_step":
            # A step's loss or gradient shows nan and infinities. An evaluation may hide them: nan crosses no threshold,
            # so neurons answer it with silence.
            return self._input_not_finite(inputs)
        if not torch.is_grad_enabled():
            return "a step needs gradients: call it outside of torch.no_grad() and torch.inference_mode()"
        return self._size_problem(samples if share is None else share.samples)

    def _target_problem(self, call: Call, targets: Any, samples: int) -> str | None:
        task = self._task
        if isinstance(task.target, str):
            return None if targets is None else f"the target is the input {task.target!r}: leave targets out"
        if call == "predict":
            return None
        takes_soft = self._takes_soft and call == "train_step"
        if takes_soft and isinstance(targets, Tensor) and targets.is_floating_point():
            if targets.shape == (samples, task.classes):
                return None
        name = "labels" if task.classes else "targets"
        return task.target.problem(name, targets, samples, self._takes_targets)

    def _input_not_finite(self, inputs: Mapping[str, Tensor]) -> str | None:
        if not self._takes_inputs:
            return None
        for name, values in inputs.items():
            problem = not_finite(name, values)
            if problem:
                return problem
        return None

    def _size_problem(self, samples: int) -> str | None:
        size = self._config.training.micro_batch_size
        sizes = micro_batch_sizes(samples, min(size, samples))
        replicas = self._state.dp.size
        weight = self._state.dp_shard.size
        # Replicas that share weights gather them together, once for each micro-batch.
        is_even = weight == 1 or len(sizes) % replicas == 0
        if len(sizes) >= replicas and is_even and sizes[-1] >= self._sample_group.size:
            return None
        return (
            f"{quantity(samples, 'sample')} in micro-batches of micro_batch_size {size} are {len(sizes)}, the last of "
            f"{sizes[-1]}: {replicas} data parallel replicas need one each (equally many, where "
            f"weight_parallel_size {weight} is above 1), and a micro-batch needs context_parallel_size "
            f"{self._sample_group.size} samples; give more samples, or the Engine another micro_batch_size"
        )

    def rank_batch(
        self, checked: CheckedBatch, position: int, evaluates: bool = False, share: SampleShare | None = None
    ) -> RankBatch:
        """This rank's micro-batches of a whole batch; there may be none in evaluation.

        Args:
            position: the first sample's index in the training.
            share: the values are this rank's only.
        """
        samples = checked.samples
        if share is not None and not share.indices:
            return RankBatch([], samples, position + samples)
        # Autograd cannot save tensors made under torch.inference_mode() for backward, but it can save copies.
        inputs = {name: x.clone() if x.is_inference() else x for name, x in checked.inputs.items()}
        targets = checked.targets.clone() if checked.targets.is_inference() else checked.targets
        if self._takes_inputs:
            # As a run's loader lays images out: another memory order would take other kernels, with other roundings.
            order = torch.channels_last
            inputs = {name: x.contiguous(memory_format=order) if x.ndim == 4 else x for name, x in inputs.items()}
        micro_batches = []
        layout = self.evaluated_layout if evaluates else self.trained_layout
        taken = 0
        for start, size in layout.spans(samples):
            first = start if share is None else taken
            taken += size
            span = slice(first, first + size)
            own_inputs = None
            own_targets = None
            if self._takes_inputs:
                own_inputs = {name: x[span] for name, x in inputs.items()}
            if self._takes_targets:
                own_targets = targets[span]
                if not own_targets.is_floating_point():
                    own_targets = own_targets.long()
            positions = torch.arange(position + start, position + start + size)
            micro_batches.append(MicroBatch(start, size, positions, own_inputs, own_targets))
        return RankBatch(micro_batches, samples, position + samples)

    def for_evaluation(self, checked: CheckedBatch) -> Iterator[RankBatch]:
        """In batches up to `global_batch_size`."""
        most = self._config.training.global_batch_size
        for start in range(0, checked.samples, most):
            inputs = {name: each[start : start + most] for name, each in checked.inputs.items()}
            targets = checked.targets[start : start + most]
            part = CheckedBatch(inputs, targets, min(most, checked.samples - start))
            yield self.rank_batch(part, start, evaluates=True)

    def of_pairs(self, pairs: Iterable[Any]) -> Iterator[RankBatch]:
        """Batches of `(inputs, targets)`, `(inputs, targets, share)` with own values, or inputs."""
        for pair in pairs:
            inputs = pair
            targets = None
            share: SampleShare | None = None
            if isinstance(pair, (tuple, list)) and len(pair) == 2:
                inputs, targets = pair
            elif isinstance(pair, (tuple, list)) and len(pair) == 3:
                inputs, targets, share = pair
            checked = self.checked("evaluate", inputs, targets, share=share)
            if share is None:
                yield from self.for_evaluation(checked)
            else:
                yield self.rank_batch(checked, 0, evaluates=True, share=share)
        # Ranks whose iterables end early meet the others here instead of leaving them in the next batch.
        self._agree("evaluate", 0)

    def micro_batches(self, batch: RankBatch, trains: bool) -> list[MicroBatchInput]:
        """Moves a batch to this rank's device, in the model's types, and cuts it into windows.

        Training mixes samples. Evaluation pads where ranks need equally many micro-batches.

        Raises:
            BatchError: on every rank, in evaluation, for a micro-batch without samples on some rank, where norms need
                its statistics.
        """
        begin = batch.consumed_samples - batch.size
        sizes = micro_batch_sizes(batch.size, min(self._config.training.micro_batch_size, batch.size))
        micro_batches = []
        for micro in batch.micro_batches:
            inputs, targets = self._on_device(micro)
            first = begin + micro.start
            positions = range(first, first + micro.size)
            if trains and self._mixing is not None:
                inputs, targets, positions = self._mixed(self._mixing, inputs, targets, positions)
            # On all ranks that share the micro-batch, which replay the same CUDA graphs.
            total_size = sizes[micro.start // sizes[0]]
            micro_batches.append(
                MicroBatchInput(
                    inputs, targets, len(positions), positions, left_out=micro.left_out, total_size=total_size
                )
            )
        if not trains:
            micro_batches += self._padding(batch)
        if self._windows == 1:
            return micro_batches
        steps = self._config.model.time_steps // self._windows
        windows = []
        for each in micro_batches:
            windows += windows_of(each, self._task, self._windows, steps)
        return windows

    def _on_device(self, micro: MicroBatch) -> tuple[dict[str, Tensor] | None, Tensor | None]:
        device = self._state.device
        specs = self._task.inputs
        inputs: dict[str, Tensor] | None = None
        if micro.inputs is not None:
            # A run's loader yields a model's only input without its name.
            named = micro.inputs if isinstance(micro.inputs, Mapping) else dict.fromkeys(specs, micro.inputs)
            inputs = {}
            for name, x in named.items():
                inputs[name] = copy_without_waiting(x, device).to(specs[name].type_for(self._dtype))
        targets: Tensor | None = None
        if micro.targets is not None:
            targets = copy_without_waiting(micro.targets, device)
            if targets.is_floating_point() and not self._task.classes:
                targets = targets.to(self._dtype)
            # A prediction has each sample's index in place of its target.
            if self._tokens is not None and targets.ndim > 1:
                targets = own_tokens(targets, self._tokens)
        return inputs, targets

    def _mixed(
        self, mixing: Mixing, inputs: dict[str, Tensor] | None, targets: Tensor | None, samples: range
    ) -> tuple[dict[str, Tensor] | None, Tensor | None, range]:
        # Samples mix with partners of the whole micro-batch, before this rank takes its own.
        own = own_span(len(samples), self._sample_group.sizes, self._sample_group.rank)
        part = slice(own.start, own.stop)
        if inputs is not None:
            inputs = {name: mixing.images(x, samples.start)[part] for name, x in inputs.items()}
        if targets is not None:
            targets = mixing.labels(targets, samples.start)[part]
        return inputs, targets, samples[part]

    def _padding(self, batch: RankBatch) -> list[MicroBatchInput]:
        """Empty micro-batches, up to the largest number on any replica."""
        # Ranks that share micro-batches or weights meet in collectives of every micro-batch, and need equally many.
        if self._state.dp_shard.size == self._sample_group.size == 1:
            return []
        size = min(self._config.training.micro_batch_size, batch.size)
        sizes = micro_batch_sizes(batch.size, size)
        if sizes[-1] < self._sample_group.size and not self._evaluates_padding:
            raise BatchError(
                f"of {batch.size} samples to evaluate the last micro-batch has {sizes[-1]}, fewer than ranks share it "
                f"(--context-parallel-size {self._sample_group.size}), and a norm of this model normalises by the "
                "batch in evaluation, too: evaluate another number of samples, or change --micro-batch-size"
            )
        missing = micro_batch_counts(batch.size, size, self._state.dp.size).most - len(batch.micro_batches)
        inputs = None
        if self._takes_inputs:
            inputs = {}
            for name, spec in self._task.inputs.items():
                inputs[name] = torch.zeros_like(spec.empty(1, self._dtype), device=self._state.device)
        return missing * [MicroBatchInput(inputs, None, 1, range(1), is_padding=True)]
