"""From whole batches to the micro-batches that this rank's chunks take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megasnn.augment.mixing import Mixing
from megasnn.batching import first_sample, micro_batch_sizes, micro_batches_of
from megasnn.config import PretrainConfig
from megasnn.data import GlobalBatch, MicroBatch
from megasnn.engine.batch_problems import NO_PAIR, image_problem, label_problem, value_problem
from megasnn.engine.build import window_count
from megasnn.engine.model import DistributedModel
from megasnn.parallel.agreement import gather
from megasnn.parallel.sharding import own_rows
from megasnn.pinned import without_waiting
from megasnn.pipeline.step_state import MicroBatchInput


class Batches:
    """Turns whole batches, which every rank is given alike, into what this rank's chunks take. Collective.

    Where ranks share a micro-batch by samples, each takes its own, but all where samples are mixed with each other:
    then it takes its own of what that gives.

    Args:
        mixing: of the samples of each micro-batch in training; None where they stay as they are.
    """

    def __init__(self, config: PretrainConfig, distributed: DistributedModel, mixing: Mixing | None) -> None:
        self._config, self._mixing = config, mixing
        self._state, self._dtype = distributed.state, distributed.context.dtype
        self._takes_images, self._takes_labels = distributed.takes_images, distributed.gives_logits
        self._samples = distributed.context.sharing_samples
        self._evaluates_padding = True
        if self._samples.size > 1:
            by_batch = sum(norm.running_mean is None for norm in distributed.norms)
            self._evaluates_padding = distributed.sum_over_ranks([by_batch])[0] == 0

    @property
    def mixes(self) -> bool:
        """Whether samples of a micro-batch are mixed with each other in training."""
        return self._mixing is not None

    def read_alike(self, training: bool) -> bool:
        """Whether ranks that share a micro-batch are given the same of it: all."""
        return self._samples.size == 1 or (training and self.mixes)

    def checked(self, images: object, labels: object = None, *, trains: bool = False, predicts: bool = False) -> int:
        """The number of samples. Collective.

        Args:
            predicts: there are no labels.
        Raises:
            ValueError: on every rank, for what is wrong on one of them, and where they are given different numbers.
        """
        problem = image_problem(images, self._config, self._takes_images)
        samples = len(images) if problem is None else 0  # type: ignore[arg-type]
        if problem is None and not predicts:
            problem = label_problem(labels, samples, self._config, self._takes_labels, trains)
        if problem is None and trains:
            problem = self._share_problem(samples) or _gradient_problem()
        if problem is None and not trains and self._takes_images:
            problem = value_problem(images)  # type: ignore[arg-type]
        self._agree(samples, problem)
        return samples

    def _agree(self, samples: int, problem: str | None = None) -> None:
        """Raises ValueError on every rank for a problem of one of them; alone, it would leave the others waiting.

        Args:
            samples: of a batch; 0 where this rank has no more batches.
        """
        found = gather(self._state.world.handle, (samples, problem))
        ended = [rank for rank, (given, problem) in enumerate(found) if problem is None and not given]
        problems = list(dict.fromkeys(each for _, each in found if each is not None))
        if problems:
            raise ValueError("; ".join(problems))
        if 0 < len(ended) < len(found):
            ranks = ", ".join(map(str, ended))
            raise ValueError(f"every rank is given as many batches, but rank {ranks} has no more of them")
        if len({given for given, _ in found}) > 1:
            sizes = ", ".join(f"{given} on rank {rank}" for rank, (given, _) in enumerate(found))
            raise ValueError(f"every rank is given the whole batch, but there are {sizes} samples")

    def _share_problem(self, samples: int) -> str | None:
        size, replicas = self._config.training.micro_batch_size, self._state.data.size
        if self._state.weight.size > 1 and -(-samples // size) % replicas:
            return (
                f"{samples} samples are {-(-samples // size)} micro-batch(es) of micro_batch_size {size} on {replicas} "
                f"data parallel replicas, and with weight_parallel_size {self._state.weight.size} each needs as many"
            )
        if -(-samples // size) < replicas:
            return (
                f"{samples} samples are {-(-samples // size)} micro-batch(es) of micro_batch_size {size}, and there "
                f"are {replicas} data parallel replicas: give more samples, or lower micro_batch_size"
            )
        last = micro_batch_sizes(samples, min(size, samples))[-1]
        if last < self._samples.size:
            return (
                f"of {samples} samples in micro-batches of micro_batch_size {size} the last one has {last}, fewer than "
                f"the ranks that share it (context_parallel_size {self._samples.size}, by samples): give another "
                "number of samples, or change micro_batch_size"
            )
        return None

    def share(
        self, images: Tensor, labels: Tensor, samples: int, position: int, evaluates: bool = False
    ) -> GlobalBatch:
        """This rank's share of a global batch: of this replica's micro-batches all samples that it takes. In evaluation
        there may be none.

        Args:
            position: in the training, of the batch's first sample.
        """
        if self._takes_images and images.ndim == 4:
            images = images.contiguous(memory_format=torch.channels_last)  # as the loader of a run gives them
        sizes = micro_batch_sizes(samples, min(self._config.training.micro_batch_size, samples))
        data, micro_batches = self._state.data, []
        ranks, rank = (1, 0) if self.mixes and not evaluates else (self._samples.size, self._samples.rank)
        for index in micro_batches_of(len(sizes), data.size, data.rank, may_be_none=evaluates):
            own = own_rows(sizes[index], ranks, rank)
            start, size = first_sample(sizes, index) + own.start, len(own)
            if not size:
                continue
            span = slice(start, start + size)
            x, y = images[span] if self._takes_images else None, None
            if self._takes_labels:
                y = labels[span] if labels.is_floating_point() else labels[span].long()
            places = torch.arange(position + start, position + start + size)
            micro_batches.append(MicroBatch(index, start, size, places, x, y))
        return GlobalBatch(micro_batches, samples, position + samples)

    def evaluated(self, images: Tensor, labels: Tensor, samples: int) -> Iterator[GlobalBatch]:
        """`share` of samples to evaluate, in parts of no more than a usual global batch."""
        most = self._config.training.global_batch_size
        for start in range(0, samples, most):
            size = min(most, samples - start)
            span = slice(start, start + size)
            yield self.share(images[span], labels[span], size, start, evaluates=True)

    def evaluated_pairs(self, pairs: Iterable[object]) -> Iterator[GlobalBatch]:
        """`evaluated` of (images, labels), one after the other. Raises what `checked` raises, also where one rank has
        fewer of them than another; what the iterable itself raises goes on, and is a ValueError on the other ranks."""
        iterator = iter(pairs)
        while True:
            try:
                pair = next(iterator)
            except StopIteration:
                break
            except Exception as error:
                with suppress(ValueError):
                    self._agree(0, f"rank {self._state.rank} has no more batches: {type(error).__name__}: {error}")
                raise
            images: Any
            labels: Any
            images, labels = _as_pair(pair)
            yield from self.evaluated(images, labels, self.checked(images, labels))
        self._agree(0)

    def inputs(self, batch: GlobalBatch) -> list[MicroBatchInput]:
        """The batch on this rank's device, in the type that the model computes in."""
        device, dtype = self._state.device, self._dtype
        begin = batch.consumed_samples - batch.size
        return [
            MicroBatchInput(
                None if micro.images is None else without_waiting(micro.images, device).to(dtype),
                None if micro.labels is None else without_waiting(micro.labels, device),
                micro.size,
                range(begin + micro.start, begin + micro.start + micro.size),
            )
            for micro in batch.micro_batches
        ]

    def training_inputs(self, batch: GlobalBatch) -> list[MicroBatchInput]:
        """What a training step takes: samples are mixed where that is asked for, and shown in windows."""
        return [window for micro in self.inputs(batch) for window in self._windows(self._mixed(micro))]

    def evaluation_inputs(self, batch: GlobalBatch) -> list[MicroBatchInput]:
        """What an evaluation takes.

        Raises:
            ValueError: on every rank, where one has no sample of a micro-batch whose statistics norms need.
        """
        last = micro_batch_sizes(batch.size, min(self._config.training.micro_batch_size, batch.size))[-1]
        if last < self._samples.size and not self._evaluates_padding:
            raise ValueError(
                f"of {batch.size} samples to evaluate the last micro-batch has {last}, fewer than the ranks that share "
                f"it (--context-parallel-size {self._samples.size}, by samples), and a norm of this model normalises "
                "by the batch in evaluation, too: evaluate another number of samples, or change --micro-batch-size"
            )
        return [window for micro in (*self.inputs(batch), *self._padding(batch)) for window in self._windows(micro)]

    def _padding(self, batch: GlobalBatch) -> list[MicroBatchInput]:
        """What this rank computes beside its share: all that share a micro-batch need equally many, also of fewer
        samples than ranks, and so do all replicas that gather weights together."""
        weight, data = self._state.weight, self._state.data
        if weight.size == self._samples.size == 1:
            return []
        count = len(micro_batch_sizes(batch.size, min(self._config.training.micro_batch_size, batch.size)))
        replica = 0 if weight.size > 1 else data.rank  # the first one has most
        missing = len(micro_batches_of(count, data.size, replica, may_be_none=True)) - len(batch.micro_batches)
        images = torch.zeros(1, *self._config.model.input_shape, dtype=self._dtype, device=self._state.device)
        padding = MicroBatchInput(images if self._takes_images else None, None, 1, range(1), is_padding=True)
        return missing * [padding]

    def _windows(self, micro: MicroBatchInput) -> Iterator[MicroBatchInput]:
        """A micro-batch for each window of the time steps: images stand for all of them, frames have theirs."""
        model, count = self._config.model, window_count(self._config)
        steps = model.time_steps // count
        for number in range(count):
            images = micro.images
            if images is not None and len(model.input_shape) == 4:
                images = images[:, number * steps : (number + 1) * steps]
            yield replace(micro, images=images, goes_on=number > 0)

    def _mixed(self, micro: MicroBatchInput) -> MicroBatchInput:
        """This rank's samples of a whole micro-batch, mixed; the micro-batch as it is where nothing is mixed."""
        if self._mixing is None or micro.samples is None:
            return micro
        own, first = own_rows(micro.size, self._samples.size, self._samples.rank), micro.samples.start
        part = slice(own.start, own.stop)
        images = None if micro.images is None else self._mixing.images(micro.images, first)[part]
        labels = None if micro.labels is None else self._mixing.labels(micro.labels, first)[part]
        return replace(micro, images=images, labels=labels, size=len(own), samples=micro.samples[part])


def _gradient_problem() -> str | None:
    if torch.is_grad_enabled():
        return None
    return "a step needs gradients: call it outside of torch.no_grad() and torch.inference_mode()"


def _as_pair(given: object) -> tuple[object, object]:
    """Images and labels of what an iterable to be evaluated has given; what is none of that is refused as labels."""
    return (given[0], given[1]) if isinstance(given, (tuple, list)) and len(given) == 2 else (given, NO_PAIR)
