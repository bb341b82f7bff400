"""From whole batches, which are checked, to the micro-batches that this rank's chunks take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megasnn.augment.mixing import Mixing
from megasnn.batching import micro_batch_sizes, most_micro_batches
from megasnn.config import PretrainConfig
from megasnn.data import GlobalBatch, MicroBatch, Share
from megasnn.engine.model import DistributedModel
from megasnn.host_memory import without_waiting
from megasnn.losses import LOSSES
from megasnn.models.task import task_of
from megasnn.parallel.agreement import gather
from megasnn.parallel.sharding import own_span
from megasnn.pipeline.microbatch_state import MicroBatchInput


class BatchError(ValueError):
    """Refusal of a batch, on every rank alike: nothing has been changed."""


class Batches:
    """Cuts whole batches, which every rank is given alike, into this rank's micro-batches. Making one is collective.

    Where ranks share a micro-batch by samples, each takes its own; but all of them where samples are mixed with each
    other: then it takes its own of the mixed ones.

    Args:
        mixing: of the samples of each micro-batch in training; None where they stay as they are.
    Attributes:
        trained_share, evaluated_share: this rank's part of every batch.
    """

    def __init__(self, config: PretrainConfig, distributed: DistributedModel, mixing: Mixing | None) -> None:
        self._config, self._mixing = config, mixing
        self._state, self._dtype = distributed.state, distributed.context.dtype
        self._takes_images, self._takes_labels = distributed.takes_images, distributed.gives_logits
        self._task = task_of(config.model)
        self._samples = samples = distributed.context.sharing_samples
        sizes, state, whole = config.training, distributed.state, mixing is not None
        part = Share(
            sizes.global_batch_size,
            sizes.micro_batch_size,
            dp_size=state.dp.size,
            dp_rank=state.dp.rank,
            cp_size=samples.size,
            cp_rank=samples.rank,
            inputs=distributed.takes_images,
            targets=distributed.gives_logits,
        )
        self.evaluated_share, self.trained_share = part, replace(part, cp_size=1, cp_rank=0) if whole else part
        by_batch = sum(norm.running_mean is None for norm in distributed.norms)
        self._evaluates_padding = samples.size == 1 or distributed.sum_over_ranks([by_batch])[0] == 0

    # --- checks

    def checked(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        trains: bool = False,
        predicts: bool = False,
        problem: str | None = None,
    ) -> tuple[Mapping[str, Tensor], Tensor, int]:
        """Returns inputs by name, targets and number of samples of a batch that is as it should be. Collective.

        Args:
            predicts: there are no targets. problem: an error text of the caller's on this rank.
        Raises:
            ValueError: on every rank, for what is wrong on one of them, and where they are given different numbers.
        """
        names, target = [*self._task.inputs], self._task.target
        given = inputs if isinstance(inputs, Mapping) or len(names) > 1 else {names[0]: inputs}
        problem = problem or self._batch_problem(given, targets, trains, predicts)
        samples = 0 if problem else len(given[names[0]])
        self.agree(samples, problem)
        return given, given[target] if isinstance(target, str) else targets, samples

    def agree(self, samples: int, problem: str | None = None) -> None:
        """Raises ValueError on every rank for a problem of one of them; alone, it would leave the others waiting.

        Args:
            samples: of a batch; 0 where this rank has no more batches.
        """
        found = gather(self._state.world.handle, problem or samples)
        if problems := [each for each in dict.fromkeys(found) if isinstance(each, str)]:
            raise BatchError("; ".join(problems))
        if len(set(found)) > 1:
            raise BatchError(f"ranks are given different numbers of samples (0 where batches have ended): {found}")

    def _batch_problem(self, inputs: Any, targets: Any, trains: bool, predicts: bool) -> str | None:
        """Returns what is wrong with a batch: with its values on the ranks that take them, elsewhere with its size."""
        task, samples = self._task, None
        if not isinstance(inputs, Mapping) or inputs.keys() != task.inputs.keys():
            found = ", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else type(inputs).__name__
            return f"the model takes a dict of its inputs, {', '.join(task.inputs)}, and got {found}"
        for name, spec in task.inputs.items():
            reads = self._takes_images or (name == task.target and self._takes_labels)
            if problem := spec.problem(name, inputs[name], samples, reads):
                return problem
            samples = len(inputs[name])
        assert samples is not None
        if isinstance(task.target, str):
            if targets is not None:
                return f"the target is the input {task.target!r}: leave targets out"
        elif not predicts and not (trains and self._are_soft(targets, samples)):
            name = "labels" if task.classes else "targets"
            if problem := task.target.problem(name, targets, samples, self._takes_labels):
                return problem
        if trains:
            return self._training_problem(samples)
        # In training loss or gradient tell of it; here neurons would hide a nan.
        for name, each in inputs.items():
            if self._takes_images and each.is_floating_point() and not bool(each.isfinite().all()):
                return f"{name} hold values that are nan or infinite: no answer follows from them"
        return None

    def _are_soft(self, labels: object, samples: int) -> bool:
        """Tells whether labels are probabilities of classes, and may be."""
        may_be = self._task.loss is None and LOSSES[self._config.training.loss].mixes and not self._config.data.mixes
        shape = samples, self._task.classes
        return may_be and isinstance(labels, Tensor) and labels.is_floating_point() and labels.shape == shape

    def _training_problem(self, samples: int) -> str | None:
        if not torch.is_grad_enabled():
            return "a step needs gradients: call it outside of torch.no_grad() and torch.inference_mode()"
        size, replicas, shared = self._config.training.micro_batch_size, self._state.dp.size, self._samples.size
        sizes, weight = micro_batch_sizes(samples, min(size, samples)), self._state.dp_shard.size
        if len(sizes) >= replicas and (weight == 1 or len(sizes) % replicas == 0) and sizes[-1] >= shared:
            return None
        return (
            f"{samples} samples are {len(sizes)} micro-batch(es) of micro_batch_size {size}, the last of {sizes[-1]}: "
            f"{replicas} data parallel replicas need one each (equally many, where weight_parallel_size {weight} is "
            f"above 1), and a micro-batch needs context_parallel_size {shared} samples; give another number of "
            "samples, or change micro_batch_size"
        )

    # --- cuts

    def share(
        self, inputs: Mapping[str, Tensor], targets: Tensor, samples: int, position: int, evaluates: bool = False
    ) -> GlobalBatch:
        """Returns this rank's share of a global batch: its samples of this replica's micro-batches. In evaluation there
        may be none.

        Args:
            position: in the training, of the batch's first sample.
        """
        if self._takes_images:  # as the loader of a run gives them
            inputs = {
                name: x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
                for name, x in inputs.items()
            }
        micro_batches = []
        for start, size in (self.evaluated_share if evaluates else self.trained_share).spans(samples):
            span = slice(start, start + size)
            x = {name: each[span] for name, each in inputs.items()} if self._takes_images else None
            y = targets[span] if self._takes_labels else None
            y = y if y is None or y.is_floating_point() else y.long()
            places = torch.arange(position + start, position + start + size)
            micro_batches.append(MicroBatch(start, size, places, x, y))
        return GlobalBatch(micro_batches, samples, position + samples)

    def evaluated(self, inputs: Mapping[str, Tensor], targets: Tensor, samples: int) -> Iterator[GlobalBatch]:
        """Yields shares of samples to evaluate, in parts of no more than a usual global batch."""
        most = self._config.training.global_batch_size
        for start in range(0, samples, most):
            size = min(most, samples - start)
            span = slice(start, start + size)
            part = {name: each[span] for name, each in inputs.items()}
            yield self.share(part, targets[span], size, start, evaluates=True)

    def evaluated_pairs(self, pairs: Iterable[Any]) -> Iterator[GlobalBatch]:
        """Yields `evaluated` of (inputs, targets), one after the other."""
        for pair in pairs:
            inputs, targets = pair if isinstance(pair, (tuple, list)) and len(pair) == 2 else (pair, None)
            yield from self.evaluated(*self.checked(inputs, targets))
        self.agree(0)

    # --- inputs of the pipeline

    def inputs(self, batch: GlobalBatch, trains: bool) -> list[MicroBatchInput]:
        """Moves a batch to this rank's device, in the type that the model computes in: in training, samples are mixed
        where that is asked for; in evaluation, it is filled up where ranks need equally many micro-batches.

        Raises:
            ValueError: on every rank, where one has no sample of a micro-batch whose statistics norms need.
        """
        device, begin = self._state.device, batch.consumed_samples - batch.size
        whole, padding = [], [] if trains else self._padding(batch)
        for micro in batch.micro_batches:
            inputs, targets = self._on_device(micro.inputs), None
            if micro.targets is not None:
                targets = without_waiting(micro.targets, device)
                if targets.is_floating_point() and not self._task.classes:
                    targets = targets.to(self._dtype)
            first, size = begin + micro.start, micro.size
            if trains and self._mixing is not None:
                own = own_span(size, self._samples.sizes, self._samples.rank)
                part = slice(own.start, own.stop)
                mix = self._mixing.images
                inputs = None if inputs is None else {name: mix(x, first)[part] for name, x in inputs.items()}
                targets = None if targets is None else self._mixing.labels(targets, first)[part]
                first, size = first + own.start, len(own)
            whole.append(MicroBatchInput(inputs, targets, size, range(first, first + size)))
        count = self._config.windows
        if count == 1:
            return whole + padding
        return [self._window(each, number) for each in whole + padding for number in range(count)]

    def _on_device(self, inputs: Tensor | Mapping[str, Tensor] | None) -> dict[str, Tensor] | None:
        """Moves inputs, of which a run has the tensor of the only one, in the types that the model takes."""
        specs, device = self._task.inputs, self._state.device
        if inputs is None:
            return None
        given = inputs if isinstance(inputs, Mapping) else dict.fromkeys(specs, inputs)
        return {name: without_waiting(x, device).to(specs[name].type_for(self._dtype)) for name, x in given.items()}

    def _window(self, micro: MicroBatchInput, number: int) -> MicroBatchInput:
        """One of the windows of a micro-batch. An image stands for all time steps; frames have theirs."""
        inputs, steps = micro.inputs, self._config.model.time_steps // self._config.windows
        if isinstance(inputs, Mapping):
            own, specs = slice(number * steps, (number + 1) * steps), self._task.inputs
            inputs = {name: x[:, own] if specs[name].over_time else x for name, x in inputs.items()}
        return replace(micro, inputs=inputs, goes_on=number > 0)

    def _padding(self, batch: GlobalBatch) -> list[MicroBatchInput]:
        """Micro-batches without samples of the batch, up to the most that a replica has: all that share a micro-batch
        need equally many, and so do all replicas that gather weights together."""
        if self._state.dp_shard.size == self._samples.size == 1:
            return []
        size = min(self._config.training.micro_batch_size, batch.size)
        sizes = micro_batch_sizes(batch.size, size)
        if sizes[-1] < self._samples.size and not self._evaluates_padding:
            raise BatchError(
                f"of {batch.size} samples to evaluate the last micro-batch has {sizes[-1]}, fewer than the ranks that "
                f"share it (--context-parallel-size {self._samples.size}, by samples), and a norm of this model "
                "normalises by the batch in evaluation, too: evaluate another number of samples, or change "
                "--micro-batch-size"
            )
        missing = most_micro_batches(batch.size, size, self._state.dp.size) - len(batch.micro_batches)
        specs = self._task.inputs.items()
        zeros = {name: torch.zeros_like(each.empty(1, self._dtype), device=self._state.device) for name, each in specs}
        padding = MicroBatchInput(zeros if self._takes_images else None, None, 1, range(1), is_padding=True)
        return missing * [padding]
