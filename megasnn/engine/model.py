"""This rank's part of a distributed model: its chunks, and what runs micro-batches through them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megasnn.common.bundle import Bundle, EntryKey, bundle_of, entries_of
from megasnn.common.checks import DeviceChecks, error_context
from megasnn.config import PretrainConfig
from megasnn.config.training import LOSSES
from megasnn.layers import BuildContext, NeuronLayer, ParallelBatchNorm, ParallelConv, ParallelLinear
from megasnn.layers.shape_inference import calls_of
from megasnn.models.description import Built, ModelDescription
from megasnn.optim.norms import GradientNorm
from megasnn.parallel.agreement import gather
from megasnn.parallel.collectives import all_reduce_sum
from megasnn.parallel.fsdp import GatheredWeights
from megasnn.parallel.gradient_buckets import GradientBuckets
from megasnn.parallel.sharding import ShardedTensor, parameter_count
from megasnn.parallel.sync_batch_norm import merge_running_statistics
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.chunk import build_chunks
from megasnn.pipeline.executor import PipelineExecutor
from megasnn.pipeline.microbatch_state import MicroBatchInput, OutputConsumer
from megasnn.pipeline.p2p import Boundaries, Transfers
from megasnn.pipeline.plan import PipelinePlan
from megasnn.pipeline.ties import Ties
from megasnn.schedule import Schedule


class StepSums(NamedTuple):
    """Sums of a step over all ranks, on the device: the host has not waited for them.

    Attributes:
        values: float64 `[4 + parameters + metrics]`: loss, votes to stop, findings of checks, statistics of norms that
            do not fit their type, the slots that `GradientNorm` sums, and the metrics.
        norm: of the gradient. is_void: True where the step must change nothing.
    """

    values: Tensor
    norm: Tensor
    is_void: Tensor


class StepFigures(NamedTuple):
    """Figures of a step, the same on every rank: loss of the global batch, sums of the metrics by name, norm of the
    gradient, and False where nothing may change."""

    mean_loss: float
    sums: dict[str, float]
    norm: float
    is_finite: bool


class DistributedModel:
    """The chunks of a model on one rank, with their gradients reduced over the replicas.

    Args:
        built: the layers of the whole model, with this context; only those of this rank get memory.
        wants_to_stop: asked in each step and each batch of an evaluation.
    Attributes:
        chunks: this rank's, by index.
        takes_images, gives_logits: True on the first chunk's rank, and on the last one's, which computes the loss.
        tensors: parameters and buffers of this rank. copies: those that another layer of the model owns (ties).
        owned: the part of each of `tensors` that this rank updates and saves: with ZeRO-1 its rows, otherwise all.
        parameters, trained_parameters: elements of the whole model's parameters.
        loss: (output of the model, targets) -> sum of the samples' losses. windows: of the time steps, for each sample.
        stop_votes: ranks that wanted to stop in the last step or batch of an evaluation, the same on every rank.
    """

    def __init__(
        self,
        description: ModelDescription,
        built: Sequence[Built],
        context: BuildContext,
        state: ParallelState,
        plan: PipelinePlan,
        config: PretrainConfig,
        wants_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.context, self.description, self.state, self.plan = context, description, state, plan
        self._wants_to_stop = wants_to_stop
        training, schedules, bounds = config.training, plan.schedules, plan.bounds
        named = partial(LOSSES[training.loss].sum, label_smoothing=training.label_smoothing)
        self.loss: Callable[[Any, Any], Tensor] = description.task.summed_loss(named)
        self.windows, self._outputs = config.windows, list[dict[EntryKey, Tensor]]()
        segment_bounds, placement = plan.segment_bounds, schedules.placement
        self._weights: GatheredWeights | None = None
        if state.dp_shard.size > 1:
            self._weights = GatheredWeights(state.dp_shard, state.dp_shard_grad, context.cast_weights.give)
        here = [index for index, home in enumerate(placement) if home == state.pp.rank]
        shard = None if self._weights is None else (segment_bounds, self._weights.shard)
        self.chunks = build_chunks(description, bounds, here, context, state.device, training.seed, built, shard)
        self.takes_images, self.gives_logits = 0 in self.chunks, len(placement) - 1 in self.chunks
        self._counts_logits = context.counts_logits
        self._reports = self.gives_logits and state.tp.rank == 0 and self._counts_logits
        local_part = (lambda entry: entry) if self._weights is None else self._weights.local_part
        self.tensors: list[ShardedTensor] = [
            local_part(t) for chunk in self.chunks.values() for t in chunk.sharded_tensors()
        ]
        self.copies = [local_part(t) for chunk in self.chunks.values() for t in chunk.copied_tensors()]
        modules = [module for chunk in self.chunks.values() for module in chunk.modules()]
        self.norms = [module for module in modules if isinstance(module, ParallelBatchNorm)]
        # Gradients that are scattered after each micro-batch are reduced after each segment; otherwise a chunk's are
        # complete when its first segment's are.
        first, segments = [0, *accumulate(schedules.segment_counts)], self.chunks
        if schedules.segments_per_chunk is not None:
            segments = {
                n: self.chunks[i].part(segment_bounds, n) for i in self.chunks for n in range(first[i], first[i + 1])
            }
        scatters = schedules.weights is not None and bool(schedules.weights.scattered)
        reduced = segments if scatters else {first[index]: chunk for index, chunk in self.chunks.items()}
        self.gradient_buckets = GradientBuckets(
            [(index, part.sharded_tensors() + part.copied_tensors()) for index, part in reduced.items()],
            state.dp_replicate_cp,
            state.tp,
            additions={m.weight: calls_of(m) for m in modules if isinstance(m, (ParallelConv, ParallelLinear))},
            shards_have_owners=config.parallel.use_distributed_optimizer,
            weights=self._weights,
            scattered=scatters,
        )
        self.owned = [self.gradient_buckets.owned(entry) for entry in self.tensors]
        gradient = self.gradient_buckets.gradient
        self.ties: Ties | None = None
        if description.ties:
            self.ties = Ties(description, bounds, placement, self.chunks, state.pp, state.device, gradient, local_part)
        context.weight_gradients.on_added = self.gradient_buckets.accumulated
        self.parameters = parameter_count(description.tensors)
        self.trained_parameters = parameter_count(e for e in description.tensors if e.tensor.requires_grad)
        names = [entry.name for entry in description.tensors if entry.is_parameter]
        self.gradient_norm = GradientNorm(names, self.owned, state.device)
        self.stop_votes = 0.0
        self._global_batch_size = 1
        self._metrics_here = torch.zeros(len(description.task.trained), dtype=torch.float64, device=state.device)
        self.checks = DeviceChecks(state.device)
        transfers = None
        if state.pp.size > 1:
            transfers = Transfers(segments, schedules.segment_placement, state, Boundaries(description, context, built))
        buckets, weights = self.gradient_buckets, self._weights
        self.executor = PipelineExecutor(segments, state, transfers, self._micro_batch_loss, buckets, weights)

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

    def run(self, micro_batches: Sequence[MicroBatchInput], global_batch_size: int) -> StepSums:
        """Zeroes gradients, runs forward and backward of this replica's micro-batches by the schedule, which reduces
        gradients over the replicas, and sums what the step came to over all ranks, in one all-reduce. The host does not
        wait for the device. Gradients are of the mean over the global batch's samples; norms' records are not merged.
        """
        self._global_batch_size = global_batch_size
        self.gradient_buckets.zero(len(micro_batches))
        for norm in self.norms:
            norm.pending.clear()
        self._metrics_here.zero_()
        loss = self._run(self.plan.schedules.training(len(micro_batches)), micro_batches).reshape(1)
        if self.ties is not None:
            self.ties.sum_gradients()
        most = torch.finfo(self.context.dtype).max
        if recorded := [value for norm in self.norms for record in norm.pending for value in record[:2]]:
            # Running statistics take unbiased variances, at most twice the biased ones.
            largest = torch.stack([each.double() for each in torch._foreach_norm(recorded, math.inf)])
            too_large = (~(largest <= most / 2)).sum(0, keepdim=True, dtype=torch.float64)
        else:
            too_large = torch.zeros_like(loss)
        metrics = self._metrics_here if self._reports else torch.zeros_like(self._metrics_here)
        loss = loss if self._reports else torch.zeros_like(loss)
        mine = [loss, self._votes_and_findings(), too_large, self.gradient_norm.squares(), metrics]
        values = all_reduce_sum(torch.cat(mine), self.state.world)
        squares = values[4 : len(values) - len(metrics)].sum()  # optimizers keep them
        is_void = (values[2] != 0) | (values[3] != 0) | ~(values[0].isfinite() & (squares <= most))
        return StepSums(values, squares.sqrt(), is_void)

    def check(self, sums: StepSums) -> StepFigures:
        """Reads the sums: the one place in a step where the host waits for the device. Raises ValueError on every rank
        for findings of one."""
        read = torch.cat([sums.is_void.to(sums.values.dtype).reshape(1), sums.values]).tolist()
        is_void, loss, self.stop_votes, found, _, *slots = read
        if found:
            self._refuse_findings()
        names = self.description.task.trained
        squares, metrics = slots[: len(slots) - len(names)], slots[len(slots) - len(names) :]
        return StepFigures(loss, dict(zip(names, metrics, strict=True)), math.sqrt(math.fsum(squares)), not is_void)

    def merge_statistics(self, most_micro_batches: int) -> None:
        """Merges what the norms recorded in the step, `most_micro_batches` on any replica, into their running
        statistics. Collective over the replicas."""
        of_owners = None if self.ties is None else self.ties.statistics_of_owners
        merge_running_statistics(self.norms, self.state.dp, most_micro_batches, of_owners)

    def refresh_copies(self) -> None:
        """Gives the values that owners have changed to the replicas and to tied layers. Collective."""
        self.gradient_buckets.all_gather_params()
        if self.ties is not None:
            self.ties.refresh()

    def evaluate(self, micro_batches: Sequence[MicroBatchInput], consume: OutputConsumer) -> None:
        """Evaluates: `consume` gets outputs for all time steps, and targets, where the logits are. Raises ValueError on
        every rank for findings of one."""
        if micro_batches:
            self._run(self.plan.schedules.evaluation(len(micro_batches)), micro_batches, consume)
        self.stop_votes, found = all_reduce_sum(self._votes_and_findings(), self.state.world).tolist()
        if found:
            self._refuse_findings()

    def run_again(self, micro_batches: Sequence[MicroBatchInput]) -> None:
        """Repeats the forward of the step before, for `debug`; changes nothing that training keeps. Collective."""
        for norm in self.norms:
            norm.recording = False
        with self.checks.collecting():  # these findings were those of the step
            schedule = self.plan.schedules.evaluation(len(micro_batches))
            self.executor.run(schedule, micro_batches, lambda output, targets: None)

    def _run(
        self, schedule: Schedule, micro_batches: Sequence[MicroBatchInput], consume: OutputConsumer | None = None
    ) -> Tensor:
        """Trains, or with `consume` evaluates; windows leave no state behind. Returns the sum of this rank's losses."""
        trains, consumer = consume is None, consume
        if consume is not None and self.windows > 1:
            consumer = partial(self._consume_whole, consume)
        for chunk in self.chunks.values():
            chunk.train(trains)
        for norm in self.norms:
            norm.recording = trains
        with self.checks.collecting(), self.context.cast_weights.caching():
            loss = self.executor.run(schedule, micro_batches, consumer)
        if self.windows > 1:
            self._outputs.clear()
            for chunk in self.chunks.values():
                chunk.forget()
        return loss

    def _micro_batch_loss(self, output: Bundle, targets: Tensor, again: bool) -> Tensor:
        loss = self.loss(output, targets) / (self._global_batch_size * self.windows)
        whole = output if again or self.windows == 1 else self._of_all_windows(output)
        if not again and whole is not None:
            task = self.description.task
            self._metrics_here += task.sums(whole, targets, task.trained)
        return loss if self._counts_logits else 0 * loss

    def _consume_whole(self, consume: OutputConsumer, output: Bundle, targets: Tensor) -> None:
        if (whole := self._of_all_windows(output)) is not None:
            consume(whole, targets)

    def _of_all_windows(self, output: Bundle) -> Bundle | None:
        """The output for all time steps, with the last window of the samples; None before it."""
        self._outputs.append({key: entry.detach() for key, entry in entries_of(output).items()})
        if len(self._outputs) < self.windows:
            return None
        whole = bundle_of({key: torch.cat([each[key] for each in self._outputs]) for key in self._outputs[0]})
        self._outputs.clear()
        return whole

    def _votes_and_findings(self) -> Tensor:
        """Returns this rank's vote to stop and its findings, `[2]`."""
        vote = torch.full((1,), float(self._wants_to_stop()), dtype=torch.float64, device=self.state.device)
        return torch.cat([vote, self.checks.count()])

    def _refuse_findings(self) -> None:
        """Raises ValueError on every rank, with the first finding of any."""
        of_ranks = gather(self.state.world.handle, self.checks.findings())
        first, *others = [each for findings in of_ranks for each in findings]
        with error_context(first.context):
            raise ValueError(f"{first.text}; and {len(others)} more" if others else first.text)

    # --- sums over ranks

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Sums numbers of the hosts over all ranks; no device takes part."""
        return [math.fsum(each) for each in zip(*gather(self.state.world.handle, values), strict=True)]

    def of_all_replicas(self, values: Tensor) -> Tensor:
        """Sums over all replicas a tensor that is where their logits are. It may be changed in place."""
        return all_reduce_sum(values if self._reports else torch.zeros_like(values), self.state.world)
