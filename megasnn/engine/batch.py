"""From whole batches, which are checked, to the micro-batches that this rank's chunks take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megasnn.augment.mixing import Mixing
from megasnn.common.grid import micro_batch_counts, micro_batch_sizes
from megasnn.common.memory import without_waiting
from megasnn.config import PretrainConfig
from megasnn.config.training import LOSSES
from megasnn.data import BatchShare, GlobalBatch, MicroBatch
from megasnn.engine.model import DistributedModel
from megasnn.engine.windows import windows_of
from megasnn.models.arrays import not_finite
from megasnn.models.build import task_of
from megasnn.parallel.agreement import gather_in_call, sum_over_ranks
from megasnn.parallel.sharding import own_span
from megasnn.pipeline.microbatch_state import MicroBatchInput


class BatchError(ValueError):
    """Refusal of a batch, on every rank alike: nothing has been changed."""


class Batches:
    """Cuts whole batches, which every rank is given alike, into this rank's micro-batches. Making one is collective.

    Ranks that share a micro-batch take their own samples; where samples are mixed, their own of the mixed ones.

    Args:
        mixing: of the samples of each micro-batch in training; None where they stay as they are.
    Attributes:
        trained_share, evaluated_share: this rank's part of every batch.
    """

    def __init__(self, config: PretrainConfig, distributed: DistributedModel, mixing: Mixing | None) -> None:
        self._config, self._mixing = config, mixing
        self._state = distributed.state
        self._dtype = distributed.context.numerics.dtype
        self._windows = config.windows
        self._takes_images, self._takes_labels = distributed.takes_images, distributed.gives_logits
        self._task = task_of(config.model)
        self._takes_soft = self._task.loss is None and LOSSES[config.training.loss].mixes and mixing is None
        self._samples = samples = distributed.context.sample_group
        part = BatchShare(
            config.training.global_batch_size,
            config.training.micro_batch_size,
            dp_size=distributed.state.dp.size,
            dp_rank=distributed.state.dp.rank,
            cp_size=samples.size,
            cp_rank=samples.rank,
            inputs=self._takes_images,
            targets=self._takes_labels,
        )
        self.evaluated_share = part
        self.trained_share = part if mixing is None else replace(part, cp_size=1, cp_rank=0)
        by_batch = sum(norm.running_mean is None for norm in distributed.norms)
        world = distributed.state.world.handle
        self._evaluates_padding = samples.size == 1 or sum_over_ranks(world, [by_batch]) == [0]

    # --- checks

    def checked(
        self, inputs: Any, targets: Any = None, trains: bool = False, predicts: bool = False, problem: str | None = None
    ) -> tuple[Mapping[str, Tensor], Tensor, int]:
        """Returns inputs by name, targets and number of samples of a batch that is as it should be. Collective.

        Args:
            predicts: there are no targets. problem: an error text of the caller's on this rank.
        Raises:
            ValueError: on every rank, for what is wrong on one of them, and where they are given different numbers.
        """
        names, target = [*self._task.inputs], self._task.target
        named = inputs if isinstance(inputs, Mapping) or len(names) > 1 else {names[0]: inputs}
        problem = problem or self._problem(named, targets, trains, predicts)
        samples = 0 if problem else len(named[names[0]])
        self._agree("train_step" if trains else "predict" if predicts else "evaluate", problem or samples)
        return named, named[target] if isinstance(target, str) else targets, samples

    def _agree(self, call: str, found: str | int) -> None:
        """Raises ValueError on every rank for a problem of one of them; alone, it would leave the others waiting. Where
        there is none, `found` is the number of samples of a batch, 0 behind the last batch."""
        try:
            of_ranks = gather_in_call(self._state.world.handle, call, found)
        except ValueError as error:
            raise BatchError(str(error)) from None
        if problems := [each for each in dict.fromkeys(of_ranks) if isinstance(each, str)]:
            raise BatchError("; ".join(problems))
        if len(set(of_ranks)) > 1:
            raise BatchError(f"ranks are given different numbers of samples (0 where batches have ended): {of_ranks}")

    def _problem(self, inputs: Any, targets: Any, trains: bool, predicts: bool) -> str | None:
        """Returns what is wrong with a batch: with its values on the ranks that take them, elsewhere with its size."""
        task, samples = self._task, 0
        if not isinstance(inputs, Mapping) or inputs.keys() != task.inputs.keys():
            found = ", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else type(inputs).__name__
            return f"the model takes a dict of its inputs, {', '.join(task.inputs)}, and got {found}"
        for name, spec in task.inputs.items():
            reads = self._takes_images or (name == task.target and self._takes_labels)
            if problem := spec.problem(name, inputs[name], samples or None, reads):
                return problem
            samples = len(inputs[name])
        if isinstance(task.target, str):
            if targets is not None:
                return f"the target is the input {task.target!r}: leave targets out"
        elif not predicts:
            is_soft = trains and self._takes_soft and isinstance(targets, Tensor) and targets.is_floating_point()
            if not is_soft or targets.shape != (samples, task.classes):
                name = "labels" if task.classes else "targets"
                if problem := task.target.problem(name, targets, samples, self._takes_labels):
                    return problem
        if not trains:  # in training loss or gradient tell of it
            read = inputs.items() if self._takes_images else ()
            return next(filter(None, (not_finite(name, each) for name, each in read)), None)
        if not torch.is_grad_enabled():
            return "a step needs gradients: call it outside of torch.no_grad() and torch.inference_mode()"
        size, replicas, shared = self._config.training.micro_batch_size, self._state.dp.size, self._samples.size
        sizes, weight = micro_batch_sizes(samples, min(size, samples)), self._state.dp_shard.size
        if len(sizes) >= replicas and (weight == 1 or len(sizes) % replicas == 0) and sizes[-1] >= shared:
            return None
        return (
            f"{samples} samples are {len(sizes)} micro-batch(es) of micro_batch_size {size}, the last of {sizes[-1]}: "
            f"{replicas} data parallel replicas need one each (equally many, where weight_parallel_size {weight} is "
            f"above 1), and a micro-batch needs context_parallel_size {shared} samples; give more "
            "samples, or the Engine another micro_batch_size"
        )

    # --- cuts

    def share(
        self, inputs: Mapping[str, Tensor], targets: Tensor, samples: int, position: int, evaluates: bool = False
    ) -> GlobalBatch:
        """Returns this rank's share of a global batch, whose first sample has this `position` in the training: its
        samples of this replica's micro-batches. In evaluation there may be none."""
        micro_batches = []
        order = torch.channels_last
        # Autograd does not keep tensors that were made under torch.inference_mode() for backward; copies it does.
        inputs = {name: x.clone() if x.is_inference() else x for name, x in inputs.items()}
        targets = targets.clone() if targets.is_inference() else targets
        if self._takes_images:  # as the loader of a run gives them
            inputs = {name: x.contiguous(memory_format=order) if x.ndim == 4 else x for name, x in inputs.items()}
        for start, size in (self.evaluated_share if evaluates else self.trained_share).spans(samples):
            span = slice(start, start + size)
            x = {name: each[span] for name, each in inputs.items()} if self._takes_images else None
            y = targets[span] if self._takes_labels else None
            y = y if y is None or y.is_floating_point() else y.long()
            positions = torch.arange(position + start, position + start + size)
            micro_batches.append(MicroBatch(start, size, positions, x, y))
        return GlobalBatch(micro_batches, samples, position + samples)

    def evaluated(self, inputs: Mapping[str, Tensor], targets: Tensor, samples: int) -> Iterator[GlobalBatch]:
        """Yields shares of samples to evaluate, in parts of no more than a usual global batch."""
        most = self._config.training.global_batch_size
        for start in range(0, samples, most):
            part = {name: each[start : start + most] for name, each in inputs.items()}
            yield self.share(part, targets[start : start + most], min(most, samples - start), start, evaluates=True)

    def evaluated_pairs(self, pairs: Iterable[Any]) -> Iterator[GlobalBatch]:
        """Yields `evaluated` of (inputs, targets), one after the other."""
        for pair in pairs:
            inputs, targets = pair if isinstance(pair, (tuple, list)) and len(pair) == 2 else (pair, None)
            yield from self.evaluated(*self.checked(inputs, targets))
        self._agree("evaluate", 0)

    # --- inputs of the pipeline

    def inputs(self, batch: GlobalBatch, trains: bool) -> list[MicroBatchInput]:
        """Moves a batch to this rank's device, in the types that the model takes: in training, samples are mixed where
        that is asked for; in evaluation, it is filled up where ranks need equally many micro-batches, and refused by a
        ValueError on every rank where one has no sample of a micro-batch whose statistics norms need."""
        device, begin, specs = self._state.device, batch.consumed_samples - batch.size, self._task.inputs
        whole, padding = [], [] if trains else self._padding(batch)
        for micro in batch.micro_batches:
            inputs, targets, first, size = None, None, begin + micro.start, micro.size
            if micro.inputs is not None:  # of a run, the tensor of the only input
                named = micro.inputs if isinstance(micro.inputs, Mapping) else dict.fromkeys(specs, micro.inputs)
                moved = {name: without_waiting(x, device) for name, x in named.items()}
                inputs = {name: x.to(specs[name].type_for(self._dtype)) for name, x in moved.items()}
            if micro.targets is not None:
                targets = without_waiting(micro.targets, device)
                if targets.is_floating_point() and not self._task.classes:
                    targets = targets.to(self._dtype)
            if trains and self._mixing is not None:
                own = own_span(size, self._samples.sizes, self._samples.rank)
                part, mix = slice(own.start, own.stop), self._mixing
                inputs = None if inputs is None else {name: mix.images(x, first)[part] for name, x in inputs.items()}
                targets = None if targets is None else mix.labels(targets, first)[part]
                first, size = first + own.start, len(own)
            whole.append(MicroBatchInput(inputs, targets, size, range(first, first + size), left_out=micro.left_out))
        whole += padding
        if self._windows == 1:
            return whole
        steps = self._config.model.time_steps // self._windows
        cut = [windows_of(micro, self._task, self._windows, steps) for micro in whole]
        return [window for of_micro in cut for window in of_micro]

    def _padding(self, batch: GlobalBatch) -> list[MicroBatchInput]:
        """Micro-batches without samples of the batch, up to the most that a replica has: all that share a micro-batch
        need equally many, and so do all replicas that gather weights together."""
        if self._state.dp_shard.size == self._samples.size == 1:
            return []
        size = min(self._config.training.micro_batch_size, batch.size)
        sizes = micro_batch_sizes(batch.size, size)
        if sizes[-1] < self._samples.size and not self._evaluates_padding:
            raise BatchError(
                f"of {batch.size} samples to evaluate the last micro-batch has {sizes[-1]}, fewer than ranks share it "
                f"(--context-parallel-size {self._samples.size}), and a norm of this model normalises by the batch in "
                "evaluation, too: evaluate another number of samples, or change --micro-batch-size"
            )
        missing = micro_batch_counts(batch.size, size, self._state.dp.size)[0] - len(batch.micro_batches)
        specs = self._task.inputs.items()
        zeros = {name: torch.zeros_like(each.empty(1, self._dtype), device=self._state.device) for name, each in specs}
        padding = MicroBatchInput(zeros if self._takes_images else None, None, 1, range(1), is_padding=True)
        return missing * [padding]
