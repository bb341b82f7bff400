"""This rank's part of a distributed model: its chunks, and what runs micro-batches through them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megasnn.bundle import Bundle, logits_of
from megasnn.device_checks import DeviceChecks
from megasnn.engine.parts import Windows, executed_parts, gathered_weights, plan_chunks, scatters
from megasnn.layers import BuildContext, NeuronLayer, ParallelBatchNorm, ParallelConv, ParallelLinear
from megasnn.layers.shape_inference import calls_of
from megasnn.layers.weight_grad import WeightGradients
from megasnn.losses.sums import correct_predictions, count_correct, cross_entropy_sum
from megasnn.models.description import ModelDescription
from megasnn.optim.norms import GradientNorm
from megasnn.parallel.agreement import gather
from megasnn.parallel.collectives import all_reduce_sum
from megasnn.parallel.gradient_buckets import GradientBuckets
from megasnn.parallel.sharding import ShardedTensor, parameter_count
from megasnn.parallel.sync_batch_norm import merge_running_statistics
from megasnn.parallel_state import ParallelState
from megasnn.pinned import without_waiting
from megasnn.pipeline.chunk import build_chunks, describe_tensors
from megasnn.pipeline.executor import OutputConsumer, PipelineError, PipelineExecutor
from megasnn.pipeline.graphs import GraphOptions
from megasnn.pipeline.microbatch_state import MicroBatchInput
from megasnn.pipeline.p2p import Boundaries, Transfers
from megasnn.pipeline.ties import Ties
from megasnn.schedule import SchedulePlan

SampleLoss = Callable[[Any, Tensor], Tensor]
"""(output of the last layer: logits, or a bundle with them; labels) -> the sum of the samples' losses."""


@dataclass(frozen=True)
class ModelOptions:
    """
    Attributes:
        windows: micro-batches that together are all time steps of the same samples, one after the other. The loss is
            the mean over them; evaluation sees the logits of all time steps.
        wants_to_stop: asked in each step and each batch of an evaluation.
        rows_have_owners: True to shard gradients and optimizer state over the replicas by rows (ZeRO-1).
        graphs: CUDA graphs of the layers; None for none.
    """

    windows: int = 1
    wants_to_stop: Callable[[], bool] = lambda: False
    rows_have_owners: bool = False
    graphs: GraphOptions | None = None


@dataclass(frozen=True)
class StepSums:
    """Sums of a step over all ranks, on the device: the host has not waited for them.

    Attributes:
        values: float64 `[5 + parameters]`: loss, correct samples, votes to stop, findings of checks, statistics of
            norms that do not fit their type, and the slots that `GradientNorm` sums.
        most: largest legal sum of the gradients' squares, so that optimizers can keep squares of them.
    """

    values: Tensor
    most: float

    @property
    def norm(self) -> Tensor:
        """Norm of the gradient, without sizes."""
        return self.values[5:].sum().sqrt()

    @property
    def is_void(self) -> Tensor:
        """True where the step must change nothing, without sizes: a check found something, or state that training keeps
        would not be finite."""
        loss, found, overflowing = self.values[0], self.values[3], self.values[4]
        return (found != 0) | (overflowing != 0) | ~(loss.isfinite() & (self.values[5:].sum() <= self.most))


class DistributedModel:
    """The chunks of a model on one rank, with their gradients reduced over the replicas.

    Args:
        model: description of the whole model; only this rank's chunks are built.
        bounds: the layers of each chunk.
        schedule: order of the actions and placement of the chunks; a name stands for equal costs.
        seed: of the initial values.

    Attributes:
        chunks: this rank's chunks by index.
        tensors: parameters and buffers of this rank. copies: those that another layer of the model owns (ties).
        owned: the part of each of `tensors` that this rank updates and saves: with ZeRO-1 its rows, otherwise all.
        described: parameters and buffers of the whole model, without values.
        parameters, trained_parameters: elements of the whole model's parameters.
        loss: sum of the samples' losses of a micro-batch.
        mean_loss, correct, norm, is_finite, stop_votes: of the last step, the same on every rank: loss of the global
            batch, samples whose class had the highest logit, norm of the gradient, whether the step may change
            anything, ranks that want to stop.
        checks: values that were wrong on this rank.
        executor: works off the schedules; its `observer` sees every action.
    """

    def __init__(
        self,
        model: ModelDescription,
        state: ParallelState,
        context: BuildContext,
        bounds: Sequence[range],
        schedule: str | SchedulePlan = "auto",
        seed: int = 0,
        loss: SampleLoss = cross_entropy_sum,
        options: ModelOptions = ModelOptions(),  # noqa: B008  (frozen)
    ) -> None:
        self.context = context = replace(context, weight_gradients=WeightGradients())
        self.model, self.state, self._options = model, state, options
        self.loss, self._windows = loss, Windows(options.windows)
        self.plan = plan = plan_chunks(schedule, state.pp.size, len(bounds))
        units = plan.unit_bounds(bounds)
        self._weights = gathered_weights(plan, state, context)
        here = [index for index, home in enumerate(plan.placement) if home == state.pp.rank]
        kept_units = () if self._weights is None else (units, self._weights.shard)
        self.chunks = build_chunks(model, bounds, here, context, state.device, seed, *kept_units)
        kept = (lambda entry: entry) if self._weights is None else self._weights.kept
        self.tensors: list[ShardedTensor] = [kept(t) for chunk in self.chunks.values() for t in chunk.sharded_tensors()]
        self.copies = [kept(t) for chunk in self.chunks.values() for t in chunk.copied_tensors()]
        modules = [module for chunk in self.chunks.values() for module in chunk.modules()]
        self.norms = [module for module in modules if isinstance(module, ParallelBatchNorm)]
        executed, reduced = executed_parts(plan, self.chunks, units)
        self.data_parallel = GradientBuckets(
            [(index, part.sharded_tensors() + part.copied_tensors()) for index, part in reduced.items()],
            state.dp_replicate_cp,
            state.tp,
            additions={m.weight: calls_of(m) for m in modules if isinstance(m, (ParallelConv, ParallelLinear))},
            rows_have_owners=options.rows_have_owners,
            weights=self._weights,
            scattered=scatters(plan),
        )
        self.owned = [self.data_parallel.owned(entry) for entry in self.tensors]
        gradient = self.data_parallel.gradient
        self._ties = Ties(model, bounds, plan.placement, self.chunks, state.pp, state.wire, gradient, kept)
        for chunk in self.chunks.values():
            chunk.weight_gradients.observer = self.data_parallel.accumulated
            if options.graphs is not None:
                chunk.capture_graphs(options.graphs)
        self.described = describe_tensors(model, BuildContext(dtype=context.dtype))
        self.parameters = parameter_count(self.described)
        trained = (e for e in self.described if e.tensor.requires_grad)
        self.trained_parameters = parameter_count(trained)
        names = [entry.name for entry in self.described if entry.is_parameter]
        self.gradient_norm = GradientNorm(names, self.owned, state.device)
        self.mean_loss = self.correct = self.norm = self.stop_votes = 0.0
        self.is_finite = True
        self._global_batch_size = 1
        self._correct_here = torch.zeros((), dtype=torch.float64, device=state.device)
        self.checks = DeviceChecks(state.device)
        known = Boundaries(model, context) if state.pp.size > 1 else None
        transfers = Transfers(executed, plan.executed_placement, state, known)
        self.executor = PipelineExecutor(
            executed, state, transfers, self._micro_batch_loss, self.data_parallel, self._count_correct, self._weights
        )
        self._training_schedule = lru_cache(maxsize=None)(plan.training)
        self._evaluation_schedule = lru_cache(maxsize=None)(plan.evaluation)

    @property
    def takes_images(self) -> bool:
        """True where micro-batches need images: this rank has the first chunk."""
        return 0 in self.chunks

    @property
    def gives_logits(self) -> bool:
        """True where micro-batches need labels: this rank has the last chunk, and computes the loss."""
        return len(self.plan.placement) - 1 in self.chunks

    def neurons(self) -> list[tuple[str, NeuronLayer]]:
        """(global name, layer) of this rank's neurons, in the order of the model."""
        return [
            (path, module)
            for chunk in self.chunks.values()
            for name, layer in chunk.named_layers()
            for path, module in layer.named_modules(prefix=name)
            if isinstance(module, NeuronLayer)
        ]

    # --- a training step

    def forward_backward(self, micro_batches: Sequence[MicroBatchInput], global_batch_size: int) -> float:
        """Computes the loss and the reduced gradients of a step: `run`, `reduce` and `check` without an update.

        Args:
            micro_batches: this replica's share.
            global_batch_size: samples over all replicas.
        Returns:
            the global batch's loss, the same on every rank.
        Raises:
            PipelineError: as `run` and `check`.
        """
        self.check(self.reduce(self.run(micro_batches, global_batch_size)))
        return self.mean_loss

    def run(self, micro_batches: Sequence[MicroBatchInput], global_batch_size: int) -> Tensor:
        """Zeroes the gradients, then runs forward and backward by the schedule, which reduces them over the replicas.

        Gradients are of the mean over the global batch's samples. The norms' records wait for `merge_statistics`.

        Returns:
            this rank's sum of the micro-batches' losses, float64, without sizes; zero without the last chunk.
        Raises:
            PipelineError: an action failed.
        """
        self._global_batch_size = global_batch_size
        self.data_parallel.zero(len(micro_batches))
        for norm in self.norms:
            norm.pending.clear()
        self._correct_here.zero_()
        self._set_mode(training=True)
        self._forget_windows()
        with self.checks.collecting(), self.context.cast_weights.kept():
            loss = self.executor.train_step(self._training_schedule(len(micro_batches)), micro_batches)
        self._forget_windows()
        self._ties.sum_gradients()
        return loss

    def reduce(self, loss: Tensor) -> StepSums:
        """Sums what a step came to over all ranks, in one all-reduce. The host does not wait for the device."""
        mine = torch.cat(
            [
                self._where_logits_are(torch.stack([loss, self._correct_here])),
                self._flags(self._options.wants_to_stop()),
                self.checks.count(),
                self._overflowing(),
                self.gradient_norm.squares(),
            ]
        )
        return StepSums(all_reduce_sum(mine, self.state.world, "step"), torch.finfo(self.context.dtype).max)

    def check(self, sums: StepSums) -> None:
        """Reads the sums: the one place in a step where the host waits for the device.

        Raises:
            PipelineError: on every rank, where the checks of one have found something.
        """
        read = torch.cat([sums.is_void.to(sums.values.dtype).reshape(1), sums.values]).tolist()
        is_void, self.mean_loss, self.correct, self.stop_votes, found, _, *squares = read
        self.is_finite = not is_void
        self._check_step(found)
        self.norm = self.gradient_norm.of(squares)

    def _check_step(self, found: float) -> None:
        """Raises PipelineError on every rank, with the first finding, where there are findings on any."""
        if found:
            of_ranks = gather(self.state.world.handle, self.checks.findings())
            first, *others = [each for findings in of_ranks for each in findings]
            cause = ValueError(f"{first.text}; and {len(others)} more" if others else first.text)
            raise PipelineError(first.place, cause) from cause

    def merge_statistics(self, most_micro_batches: int) -> None:
        """Merges the step's records into the norms' running statistics. Collective over the replicas.

        Args:
            most_micro_batches: of any replica.
        """
        merge_running_statistics(self.norms, self.state.dp, most_micro_batches, self._ties.statistics_of_owners)

    def all_gather_params(self) -> None:
        """Gathers the new values of `owned` rows on all replicas (ZeRO-1). Collective."""
        self.data_parallel.all_gather_params()

    def refresh_copies(self) -> None:
        """Gives the copies of tied tensors the values of their owners. Collective."""
        self._ties.refresh()

    def _micro_batch_loss(self, output: Bundle, labels: Tensor) -> Tensor:
        loss = self.loss(output, labels) / (self._global_batch_size * self._windows.count)
        return loss if self.context.counts_logits else 0 * loss

    def _count_correct(self, output: Bundle, labels: Tensor) -> None:
        joined = self._windows.join(output)
        if joined is not None:
            self._correct_here += count_correct(logits_of(joined), labels)

    def _overflowing(self) -> Tensor:
        """Counts statistics of the step that the running ones cannot hold, `[1]`: an unbiased variance is at most twice
        the biased one."""
        tracked = [norm for norm in self.norms if norm.running_mean is not None]
        recorded = [value for norm in tracked for mean, variance, _ in norm.pending for value in (mean, variance)]
        if not recorded:
            return torch.zeros(1, dtype=torch.float64, device=self.state.device)
        largest = torch.stack([each.double() for each in torch._foreach_norm(recorded, math.inf)])
        return (~(largest <= torch.finfo(self.context.dtype).max / 2)).sum(0, keepdim=True, dtype=torch.float64)

    # --- evaluation

    def evaluate(self, micro_batches: Sequence[MicroBatchInput]) -> list[float]:
        """Returns [sum of losses, samples, correct in top 1, correct in top 5] where the logits are, else zeros."""
        totals = torch.zeros(4, dtype=torch.float64, device=self.state.device)

        def consume(output: Bundle, labels: Tensor) -> None:
            totals[0] += self.loss(output, labels)
            totals[1] += len(labels)
            totals[2:] += correct_predictions(logits_of(output), labels)

        *values, self.stop_votes, found = torch.cat([totals, self._forward(micro_batches, consume)]).tolist()
        self._check_step(found)
        return values

    def predict(self, micro_batches: Sequence[MicroBatchInput], consume: OutputConsumer) -> None:
        """Runs forward; `consume` gets outputs for all time steps, and labels, where the logits are."""
        self._check_step(self._forward(micro_batches, consume)[1].item())

    def _forward(self, micro_batches: Sequence[MicroBatchInput], consume: OutputConsumer) -> Tensor:
        """Returns votes to stop and findings of all ranks, `[2]`."""

        def consume_joined(output: Bundle, labels: Tensor) -> None:
            joined = self._windows.join(output)
            if joined is not None:
                consume(joined, labels)

        self._set_mode(training=False)
        if micro_batches:
            self._forget_windows()
            with self.checks.collecting(), self.context.cast_weights.kept():
                self.executor.evaluate(self._evaluation_schedule(len(micro_batches)), micro_batches, consume_joined)
            self._forget_windows()
        mine = torch.cat([self._flags(self._options.wants_to_stop()), self.checks.count()])
        return all_reduce_sum(mine, self.state.world, "step")

    def run_again(self, micro_batches: Sequence[MicroBatchInput]) -> None:
        """Repeats the forward of the step before, for `debug`; changes nothing that training keeps. Collective."""
        for norm in self.norms:
            norm.recording = False
        with self.checks.collecting():  # these findings were those of the step
            schedule = self._evaluation_schedule(len(micro_batches))
            self.executor.evaluate(schedule, micro_batches, lambda output, labels: None)

    # --- sums over ranks

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Sums numbers of the hosts over all ranks; no device takes part."""
        return [math.fsum(each) for each in zip(*gather(self.state.world.handle, values), strict=True)]

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over all replicas the values where their logits are."""
        return self.of_all_replicas(torch.tensor(values, dtype=torch.float64, device=self.state.device)).tolist()

    def of_all_replicas(self, values: Tensor) -> Tensor:
        """Sums over all replicas a tensor that is where their logits are. It may be changed in place."""
        return all_reduce_sum(self._where_logits_are(values), self.state.world, "step")

    def _where_logits_are(self, values: Tensor) -> Tensor:
        """The values on one rank of those that compute the same, zeros on all others."""
        counts = self.gives_logits and self.state.tp.rank == 0 and self.context.counts_logits
        return values if counts else torch.zeros_like(values)

    def _flags(self, *flags: bool) -> Tensor:
        return without_waiting(torch.tensor(flags, dtype=torch.float64), self.state.device)

    def _set_mode(self, training: bool) -> None:
        for chunk in self.chunks.values():
            chunk.train(training)
        for norm in self.norms:
            norm.recording = training

    def _forget_windows(self) -> None:
        """Drops the state that windows left for the next ones."""
        self._windows.outputs.clear()
        for chunk in self.chunks.values():
            chunk.forget()
