"""One distributed model: this rank's chunks, and what runs micro-batches through them, forward and backward.

Data, tensor and pipeline parallelism are built together here, from a model description and the grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from megasnn.bundle import Bundle, logits_of
from megasnn.device_checks import DeviceChecks
from megasnn.engine.check_step import check_step
from megasnn.engine.parts import executed_parts, gathered_weights, planned
from megasnn.engine.windows import Windows
from megasnn.grid import Place
from megasnn.layers import BuildContext, NeuronLayer, ParallelBatchNorm, ParallelConv, ParallelLinear
from megasnn.layers.holding import calls_of
from megasnn.losses.sums import correct_predictions, count_correct, cross_entropy_sum
from megasnn.models.compare_cut import compare_with_whole
from megasnn.models.description import ModelDescription
from megasnn.optim import GradientNorm
from megasnn.parallel.agreement import gather
from megasnn.parallel.collectives import all_reduce_sum
from megasnn.parallel.gradient_buckets import GradientBuckets
from megasnn.parallel.sharding import ShardedTensor, parameter_count
from megasnn.parallel.sync_batch_norm import merge_running_statistics
from megasnn.parallel_state import ParallelState
from megasnn.pinned import without_waiting
from megasnn.pipeline.boundaries import Boundaries
from megasnn.pipeline.capture import GraphOptions
from megasnn.pipeline.chunk import PipelineChunk, build_chunk, describe_tensors
from megasnn.pipeline.executor import PipelineExecutor
from megasnn.pipeline.interfaces import OutputConsumer
from megasnn.pipeline.p2p import WireOptions
from megasnn.pipeline.step_state import MicroBatchInput
from megasnn.pipeline.ties import Ties
from megasnn.schedule import SchedulePlan

SampleLoss = Callable[[Any, Tensor], Tensor]
"""(what the model's last layer gives: logits, or a bundle with them; labels) -> the sum of the samples' losses."""


@dataclass(frozen=True)
class StepSums:
    """What a step came to, summed over all ranks, on the device: nothing has waited for it.

    Attributes:
        values: float64 `[6 + parameters]`: loss, correct samples, votes to stop, ranks that lack CUDA graphs, findings
            of checks, statistics of norms that do not fit their type, and the parts that `GradientNorm` sums.
        most: that the sum of the gradients' squares may be, so that optimizers can keep squares of them.
    """

    values: Tensor
    most: float

    @property
    def squares(self) -> Tensor:
        """Of the gradient's norm, without sizes."""
        return self.values[6:].sum()

    @property
    def is_void(self) -> Tensor:
        """True where the step must change nothing, without sizes: something was found, or something that training
        keeps would not be finite."""
        loss, found, overflowing = self.values[0], self.values[4], self.values[5]
        return (found != 0) | (overflowing != 0) | ~(loss.isfinite() & (self.squares <= self.most))


class DistributedModel:
    """
    Args:
        model: what to build; only this rank's chunks are.
        bounds: the layers of each chunk.
        schedule: how micro-batches go through the chunks, and on which pipeline rank each of them lives; a name alone
            stands for equal costs.
        seed: of the initial values.
        loss: the sum of the samples' losses; see SampleLoss.
        wires: how tensors travel between stages.
        windows: micro-batches that together are all time steps of the same samples, one after the other. The loss is
            the mean over them; evaluation sees the logits of all time steps.
        waits_after_actions: see PipelineExecutor.
        wants_to_stop: asked in each step and each batch of an evaluation; the run is to end after it, as far as this
            rank is concerned.
        rows_have_owners: whether each row of a trained parameter belongs to one of the replicas.
        graphs: how layers become CUDA graphs; None: they do not.

    Attributes:
        context: what the layers were built with.
        chunks: this rank's chunks by index.
        tensors: parameters and buffers of this rank. copies: those that another of the model's layers owns, and which
            are no parameters of the model by themselves. owned: in the place of `tensors` what this rank updates and
            saves of each: its rows, with the reduced gradient, where rows have owners, and else all. Of parameters that
            are kept by rows, all three are of this rank's rows.
        described: the parameters and buffers of the whole model, without values.
        parameters, trained_parameters: number of elements of the whole model's parameters.
        stop_votes: how many ranks wanted that in the last step or batch, the same on every rank.
        correct: samples of the last step, over all replicas, whose class had the highest logit; the same on every rank.
        is_finite: whether the last step may change anything, the same on every rank.
        norm: of the last step's gradient, the same on every rank; gradient_norm: what it follows from, and clips.
        checks: what is wrong in a step, an evaluation or a prediction on this rank.
        plan: the schedules and the placement of the chunks.
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
        wires: WireOptions = WireOptions(),  # noqa: B008  (frozen)
        windows: int = 1,
        waits_after_actions: bool = False,
        wants_to_stop: Callable[[], bool] = lambda: False,
        rows_have_owners: bool = False,
        graphs: GraphOptions | None = None,
    ) -> None:
        self._windows = Windows(windows)
        self.model, self.state, self.context, self.loss = model, state, context, loss
        self.plan = planned(schedule, state.pipeline.size, len(bounds))
        placement, units = self.plan.placement, self.plan.unit_bounds(bounds)
        self._weights = gathered_weights(self.plan, state, context)
        build = partial(build_chunk, model, bounds, context=context, device=state.device, seed=seed)
        if self._weights is not None:
            build = partial(build, parts=units, keep=self._weights.shard)
        self.chunks: dict[int, PipelineChunk] = {
            index: build(index) for index, home in enumerate(placement) if home == state.pipeline.rank
        }
        mine = (number for index in self.chunks for number in bounds[index])
        compare_with_whole(model, context, mine, state.device, seed)
        kept = self._kept
        self.tensors: list[ShardedTensor] = [kept(t) for chunk in self.chunks.values() for t in chunk.sharded_tensors()]
        self.copies = [kept(t) for chunk in self.chunks.values() for t in chunk.copied_tensors()]
        self._modules = [module for chunk in self.chunks.values() for module in chunk.modules()]
        self.norms = [module for module in self._modules if isinstance(module, ParallelBatchNorm)]
        executed, reduced = executed_parts(self.plan, self.chunks, units)
        self.data_parallel = GradientBuckets(
            [(index, part.sharded_tensors() + part.copied_tensors()) for index, part in reduced.items()],
            state.dp_replicate_cp,
            state.tensor,
            additions={
                each.weight: calls_of(each)
                for each in self._modules
                if isinstance(each, (ParallelConv, ParallelLinear))
            },
            rows_have_owners=rows_have_owners,
            weights=self._weights,
            scattered=self.plan.weights is not None and bool(self.plan.weights.scattered),
        )
        self.owned = [self.data_parallel.owned(entry) for entry in self.tensors]
        gradient = self.data_parallel.gradient
        self._ties = Ties(model, bounds, placement, self.chunks, state.pipeline, state.communicators, gradient, kept)
        for chunk in self.chunks.values():
            chunk.weight_gradients.observer = self.data_parallel.accumulated
            if graphs is not None:
                chunk.record_graphs(graphs)
        self.described = whole = describe_tensors(model, BuildContext(dtype=context.dtype))
        self.parameters = parameter_count(whole)
        trained = (entry for entry in whole if not context.is_frozen(entry.name) and entry.tensor.requires_grad)
        self.trained_parameters = parameter_count(trained)
        names = [e.name for e in whole if e.is_parameter]
        place = Place(state.grid, state.coordinates)
        self.gradient_norm = GradientNorm(names, self.owned, state.device, place)
        self._global_batch_size = 1
        self._wants_to_stop = wants_to_stop
        self.stop_votes = self.correct = self.norm = 0.0
        self.is_finite = True
        self._correct_here = torch.zeros((), dtype=torch.float64, device=state.device)
        self.executor = PipelineExecutor(
            executed,
            self.plan.executed_placement,
            state,
            self._micro_batch_loss,
            self.data_parallel,
            seen=self._count_correct,
            wires=wires,
            waits=waits_after_actions,
            wholes=self.plan.wholes,
            weights=self._weights,
            boundaries=Boundaries(model, context),
        )
        self.checks = DeviceChecks(state.device)
        self._training_schedule = lru_cache(maxsize=None)(self.plan.training)
        self._evaluation_schedule = lru_cache(maxsize=None)(self.plan.evaluation)

    def _kept(self, entry: ShardedTensor) -> ShardedTensor:
        """What this rank keeps of a tensor of its layers."""
        return entry if self._weights is None else self._weights.kept(entry)

    @property
    def takes_images(self) -> bool:
        """Whether this rank's micro-batches need images: it has the first chunk."""
        return 0 in self.chunks

    @property
    def gives_logits(self) -> bool:
        """Whether this rank's micro-batches need labels: it has the last chunk, and computes the loss."""
        return len(self.plan.placement) - 1 in self.chunks

    def _micro_batch_loss(self, output: Bundle, labels: Tensor) -> Tensor:
        loss = self.loss(output, labels) / (self._global_batch_size * self._windows.count)
        return loss if self.context.counts_logits else 0 * loss

    def _count_correct(self, output: Bundle, labels: Tensor) -> None:
        whole = self._windows.joined(output)
        if whole is not None:
            self._correct_here += count_correct(logits_of(whole), labels)

    def _forget_windows(self) -> None:
        """Between steps: what windows left for the next ones goes."""
        self._windows.forget()
        for chunk in self.chunks.values():
            chunk.forget()

    def neurons(self) -> list[tuple[str, NeuronLayer]]:
        """(global name, layer) of this rank's neurons, in the order of the model."""
        return [
            (path, module)
            for chunk in self.chunks.values()
            for name, layer in chunk.named_layers()
            for path, module in layer.named_modules(prefix=name)
            if isinstance(module, NeuronLayer)
        ]

    def forward_backward(self, micro_batches: Sequence[MicroBatchInput], global_batch_size: int) -> float:
        """One step up to the gradients: mean over the global batch's samples, reduced over the replicas.

        The norms' records of the step wait for `merge_statistics`; the next step drops what was not merged. The host
        does not wait for the device before it reads, once, what the step came to.

        Args:
            micro_batches: this replica's share.
            global_batch_size: samples over all replicas.
        Returns:
            the global batch's loss, the same on every rank.
        Raises:
            PipelineError: an action failed, or on every rank, values were not what they should be.
        """
        return self.finish_step(self.start_step(micro_batches, global_batch_size))

    def start_step(self, micro_batches: Sequence[MicroBatchInput], global_batch_size: int) -> StepSums:
        """The first part of `forward_backward`: starts all of it, and does not wait for the device."""
        self._global_batch_size = global_batch_size
        with self.checks.collecting():
            return self._sums(self._run_step(micro_batches))

    def finish_step(self, sums: StepSums) -> float:
        """The second part of `forward_backward`: the loss. The one place in a step where the host waits for the
        device."""
        told = torch.cat([sums.is_void.to(sums.values.dtype).reshape(1), sums.values]).tolist()
        is_void, total, self.correct, self.stop_votes, lacking, found, _, *parts = told
        self.is_finite = not is_void
        check_step(found, self.checks, self.state.world)
        self.executor.make_graphs(lacking > 0)
        self.norm = self.gradient_norm.of(parts)
        return total

    def _run_step(self, micro_batches: Sequence[MicroBatchInput]) -> Tensor:
        self.data_parallel.zero(len(micro_batches))
        for norm in self.norms:
            norm.pending.clear()
        self._correct_here.zero_()
        self._set_mode(training=True)
        self._forget_windows()
        with self.context.cast_weights.kept():
            loss = self.executor.train_step(self._training_schedule(len(micro_batches)), micro_batches)
        self._forget_windows()
        self._ties.sum_gradients()
        return loss

    def _sums(self, loss: Tensor) -> StepSums:
        """Collective over the world."""
        mine = torch.cat(
            [
                self._where_logits_are(torch.stack([loss, self._correct_here])),
                self._told(self._wants_to_stop(), self.executor.lacks_graphs),
                self.checks.count(),
                self._overflowing(),
                self.gradient_norm.squares(),
            ]
        )
        return StepSums(all_reduce_sum(mine, self.state.world, "step"), torch.finfo(self.context.dtype).max)

    def _overflowing(self) -> Tensor:
        """How many statistics of the step's micro-batches the running ones cannot hold, `[1]`: an unbiased variance is
        at most twice the biased one."""
        tracked = [norm for norm in self.norms if norm.running_mean is not None]
        recorded = [value for norm in tracked for mean, variance, _ in norm.pending for value in (mean, variance)]
        if not recorded:
            return torch.zeros(1, dtype=torch.float64, device=self.state.device)
        largest = torch.stack([each.double() for each in torch._foreach_norm(recorded, math.inf)])
        return (~(largest <= torch.finfo(self.context.dtype).max / 2)).sum(0, keepdim=True, dtype=torch.float64)

    def _told(self, *what: bool) -> Tensor:
        """What this rank's host has to say."""
        return without_waiting(torch.tensor(what, dtype=torch.float64), self.state.device)

    def merge_statistics(self, most_micro_batches: int) -> None:
        """Takes the step's records, of no more than so many micro-batches in any replica, into the norms' running
        statistics. Collective over the replicas."""
        merge_running_statistics(self.norms, self.state.data, most_micro_batches, self._ties.statistics_of_owners)

    def all_gather_params(self) -> None:
        """After `owned` has changed: gives all replicas the new values of this rank's rows. Collective."""
        self.data_parallel.all_gather_params()

    def refresh_copies(self) -> None:
        """After the tensors have changed, by a step or otherwise: gives their copies the new values. Collective."""
        self._ties.refresh()

    def evaluate(self, micro_batches: Sequence[MicroBatchInput]) -> list[float]:
        """[sum of losses, samples, correct in top 1, correct in top 5] of these micro-batches, where the logits are."""
        totals = torch.zeros(4, dtype=torch.float64, device=self.state.device)

        def consume(output: Bundle, labels: Tensor) -> None:
            totals[0] += self.loss(output, labels)
            totals[1] += len(labels)
            totals[2:] += correct_predictions(logits_of(output), labels)

        *values, self.stop_votes, found = torch.cat([totals, self._forward(micro_batches, consume)]).tolist()
        check_step(found, self.checks, self.state.world)
        return values

    def predict(self, micro_batches: Sequence[MicroBatchInput], consume: OutputConsumer) -> None:
        """Forward in evaluation; `consume` gets the output for all time steps and the labels, where the logits are."""
        check_step(self._forward(micro_batches, consume)[1].item(), self.checks, self.state.world)

    def _forward(self, micro_batches: Sequence[MicroBatchInput], consume: OutputConsumer) -> Tensor:
        """Returns how many ranks want to stop, and how much the checks of all ranks have found, `[2]`."""

        def consume_whole(output: Bundle, labels: Tensor) -> None:
            whole = self._windows.joined(output)
            if whole is not None:
                consume(whole, labels)

        self._set_mode(training=False)
        if micro_batches:
            self._forget_windows()
            with self.checks.collecting(), self.context.cast_weights.kept():
                self.executor.evaluate(self._evaluation_schedule(len(micro_batches)), micro_batches, consume_whole)
            self._forget_windows()
        mine = torch.cat([self._told(self._wants_to_stop()), self.checks.count()])
        return all_reduce_sum(mine, self.state.world, "step")

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, on every rank, of what hosts know; no device takes part."""
        return [math.fsum(each) for each in zip(*gather(self.state.world.handle, values), strict=True)]

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over all replicas of the values where their logits are, on every rank."""
        return self.of_all_replicas(torch.tensor(values, dtype=torch.float64, device=self.state.device)).tolist()

    def of_all_replicas(self, values: Tensor) -> Tensor:
        """Sums over all replicas of a tensor that is where their logits are, on every rank. It may be changed."""
        return all_reduce_sum(self._where_logits_are(values), self.state.world, "step")

    def _where_logits_are(self, values: Tensor) -> Tensor:
        """The values on one rank of those that compute the same, and zeros on all others."""
        counts = self.gives_logits and self.state.tensor.rank == 0 and self.context.counts_logits
        return values if counts else torch.zeros_like(values)

    def run_again(self, micro_batches: Sequence[MicroBatchInput]) -> None:
        """The forward of the step before once more, for those who look at it; changes nothing that training keeps.

        Collective over the groups of the pipeline, of tensor parallelism, and of replicas that share weights.
        """
        for norm in self.norms:
            norm.recording = False
        with self.checks.collecting():  # what is found here was found in the step
            schedule = self._evaluation_schedule(len(micro_batches))
            self.executor.evaluate(schedule, micro_batches, lambda output, labels: None)

    def _set_mode(self, training: bool) -> None:
        for chunk in self.chunks.values():
            chunk.train(training)
        for norm in self.norms:
            norm.recording = training
