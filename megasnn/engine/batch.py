"""From whole batches, which are checked, to the micro-batches that this rank's chunks take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
        self._samples = samples = distributed.context.sharing_samples
        sizes, state, whole = config.training, distributed.state, mixing is not None
        part = Share(
            sizes.global_batch_size,
            sizes.micro_batch_size,
            dp_size=state.dp.size,
            dp_rank=state.dp.rank,
            cp_size=samples.size,
            cp_rank=samples.rank,
            images=distributed.takes_images,
            labels=distributed.gives_logits,
        )
        self.evaluated_share, self.trained_share = part, replace(part, cp_size=1, cp_rank=0) if whole else part
        by_batch = sum(norm.running_mean is None for norm in distributed.norms)
        self._evaluates_padding = samples.size == 1 or distributed.sum_over_ranks([by_batch])[0] == 0

    # --- checks

    def checked(
        self,
        images: object,
        labels: object = None,
        *,
        trains: bool = False,
        predicts: bool = False,
        problem: str | None = None,
    ) -> int:
        """Returns the number of samples of a batch that is as it should be. Collective.

        Args:
            predicts: there are no labels. problem: an error text of the caller's on this rank.
        Raises:
            ValueError: on every rank, for what is wrong on one of them, and where they are given different numbers.
        """
        problem = problem or self._batch_problem(images, labels, trains, predicts)
        samples = 0 if problem else len(images)  # type: ignore[arg-type]
        self.agree(samples, problem)
        return samples

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

    def _batch_problem(self, images: Any, labels: Any, trains: bool, predicts: bool) -> str | None:
        """Returns what is wrong with a batch: with its values on the ranks that take them, elsewhere with its size."""
        shape = self._config.model.input_shape
        fits = isinstance(images, Tensor) and images.ndim > 0 and len(images) > 0
        if fits and self._takes_images:
            fits = images.shape[1:] == shape and images.is_floating_point()
        if not fits:
            sizes = ", ".join(map(str, shape))
            return (
                f"images must be floating-point values [N, {sizes}] of one sample or more, as the model's input_shape "
                f"says, got {_described(images)}"
            )
        samples, classes, loss = len(images), self._config.model.num_classes, LOSSES[self._config.training.loss]
        takes_soft = trains and loss.mixes and not self._config.data.mixes
        fits = isinstance(labels, Tensor) and labels.ndim > 0 and len(labels) == samples
        is_soft = takes_soft and fits and labels.is_floating_point() and labels.shape == (samples, classes)
        if fits and self._takes_labels and not is_soft:
            others = labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool
            fits = labels.ndim == 1 and not others
        if not predicts and not fits:
            soft = f", or probabilities [{samples}, {classes}]" if takes_soft else ""
            return (
                f"labels must be class indices [{samples}] of an integer type{soft}, for {samples} images, got "
                f"{_described(labels)}"
            )
        if not predicts and self._takes_labels and not is_soft:
            lowest, highest = int(labels.long().min()), int(labels.long().max())
            if not 0 <= lowest <= highest < classes:
                return f"labels are from {lowest} to {highest}; num_classes {classes} needs 0 to {classes - 1}"
        if trains:
            return self._training_problem(samples)
        # In training loss or gradient tell of it; here neurons would hide a nan.
        if self._takes_images and not bool(images.isfinite().all()):
            return "images hold values that are nan or infinite: no class follows from them"
        return None

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
        self, images: Tensor, labels: Tensor, samples: int, position: int, evaluates: bool = False
    ) -> GlobalBatch:
        """Returns this rank's share of a global batch: its samples of this replica's micro-batches. In evaluation there
        may be none.

        Args:
            position: in the training, of the batch's first sample.
        """
        if self._takes_images and images.ndim == 4:
            images = images.contiguous(memory_format=torch.channels_last)  # as the loader of a run gives them
        micro_batches = []
        for start, size in (self.evaluated_share if evaluates else self.trained_share).spans(samples):
            span = slice(start, start + size)
            x, y = images[span] if self._takes_images else None, None
            if self._takes_labels:
                y = labels[span] if labels.is_floating_point() else labels[span].long()
            places = torch.arange(position + start, position + start + size)
            micro_batches.append(MicroBatch(start, size, places, x, y))
        return GlobalBatch(micro_batches, samples, position + samples)

    def evaluated(self, images: Tensor, labels: Tensor, samples: int) -> Iterator[GlobalBatch]:
        """Yields shares of samples to evaluate, in parts of no more than a usual global batch."""
        most = self._config.training.global_batch_size
        for start in range(0, samples, most):
            size = min(most, samples - start)
            span = slice(start, start + size)
            yield self.share(images[span], labels[span], size, start, evaluates=True)

    def evaluated_pairs(self, pairs: Iterable[Any]) -> Iterator[GlobalBatch]:
        """Yields `evaluated` of (images, labels), one after the other."""
        images: Any
        labels: Any
        for pair in pairs:
            images, labels = pair if isinstance(pair, (tuple, list)) and len(pair) == 2 else (pair, None)
            yield from self.evaluated(images, labels, self.checked(images, labels))
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
            images = None if micro.images is None else without_waiting(micro.images, device).to(self._dtype)
            labels = None if micro.labels is None else without_waiting(micro.labels, device)
            first, size = begin + micro.start, micro.size
            if trains and self._mixing is not None:
                own = own_span(size, self._samples.sizes, self._samples.rank)
                part = slice(own.start, own.stop)
                images = None if images is None else self._mixing.images(images, first)[part]
                labels = None if labels is None else self._mixing.labels(labels, first)[part]
                first, size = first + own.start, len(own)
            whole.append(MicroBatchInput(images, labels, size, range(first, first + size)))
        model = self._config.model
        count = self._config.windows
        if count == 1:
            return whole + padding
        steps, has_frames, windows = model.time_steps // count, len(model.input_shape) == 4, list[MicroBatchInput]()
        for each in whole + padding:
            for number in range(count):
                images = each.images  # which stand for all time steps; frames have theirs
                if images is not None and has_frames:
                    images = images[:, number * steps : (number + 1) * steps]
                windows.append(replace(each, images=images, goes_on=number > 0))
        return windows

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
        images = torch.zeros(1, *self._config.model.input_shape, dtype=self._dtype, device=self._state.device)
        padding = MicroBatchInput(images if self._takes_images else None, None, 1, range(1), is_padding=True)
        return missing * [padding]


def _described(value: object) -> str:
    return f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
