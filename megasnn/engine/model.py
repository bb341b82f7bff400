"""This rank's part of a distributed model: its chunks, and the schedules that take micro-batches through them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megasnn.common.bundle import Bundle
from megasnn.common.checks import DeviceChecks, error_context
from megasnn.engine.loss import MicroBatchLoss
from megasnn.engine.step_sums import StepFigures, StepSums
from megasnn.engine.windows import WindowOutputs
from megasnn.layers import BuildContext, NeuronLayer, ParallelBatchNorm
from megasnn.models.description import ModelDescription
from megasnn.optim.norms import GradientNorm
from megasnn.parallel.agreement import gather
from megasnn.parallel.collectives import all_reduce_sum
from megasnn.parallel.gradient_buckets import GradientBuckets
from megasnn.parallel.sharding import ShardedTensor, parameter_count
from megasnn.parallel.sync_batch_norm import merge_running_statistics
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.chunk import PipelineChunk
from megasnn.pipeline.executor import PipelineExecutor
from megasnn.pipeline.microbatch_state import MicroBatchInput, OutputConsumer
from megasnn.pipeline.plan import PipelinePlan
from megasnn.pipeline.ties import Ties


@dataclass(kw_only=True)
class DistributedModel:
    """The chunks of a model on one rank, with their gradients reduced over the replicas. `build_replica` makes it.

    Attributes:
        description: of the whole model. context: of the building of its layers.
        chunks: of this rank, by index.
        takes_images, gives_logits: True on a rank of the first stage, and of the last stage, which computes the loss.
        reports: True on one of the ranks that have the same logits.
        tensors: parameters and buffers of this rank. copies: tensors of it that another layer owns (ties).
        owned: the part of each of `tensors` that this rank updates and saves: with ZeRO-1 its shard, otherwise all.
        norms: batch norms of this rank.
        loss: of the micro-batches, and their metrics.
        wants_to_stop: asked in each step and each batch of an evaluation.
        stop_votes: ranks that wanted to stop in the last step or batch of an evaluation, the same on every rank.
    """

    description: ModelDescription
    context: BuildContext
    plan: PipelinePlan
    chunks: Mapping[int, PipelineChunk]
    takes_images: bool
    gives_logits: bool
    reports: bool
    tensors: Sequence[ShardedTensor]
    copies: Sequence[ShardedTensor]
    owned: Sequence[ShardedTensor]
    norms: Sequence[ParallelBatchNorm]
    gradient_buckets: GradientBuckets
    gradient_norm: GradientNorm
    ties: Ties | None
    loss: MicroBatchLoss
    executor: PipelineExecutor
    checks: DeviceChecks
    wants_to_stop: Callable[[], bool] = lambda: False
    stop_votes: float = field(default=0.0, init=False)

    @property
    def state(self) -> ParallelState:
        """Grid of ranks and process groups."""
        return self.context.state

    @property
    def parameters(self) -> int:
        """Elements of the whole model's parameters."""
        return parameter_count(self.description.tensors)

    @property
    def trained_parameters(self) -> int:
        """Elements of the whole model's parameters that have a gradient."""
        return parameter_count(entry for entry in self.description.tensors if entry.tensor.requires_grad)

    def neurons(self) -> list[tuple[str, NeuronLayer]]:
        """(global name, layer) of this rank's neurons, in the order of the model."""
        found = []
        for chunk in self.chunks.values():
            for name, layer in chunk.named_layers():
                for path, module in layer.named_modules(prefix=name):
                    if isinstance(module, NeuronLayer):
                        found.append((path, module))
        return found

    def run(self, micro_batches: Sequence[MicroBatchInput], global_batch_size: int) -> StepSums:
        """Takes this replica's micro-batches forward and backward, and sums the step over all ranks. Collective.

        The schedule reduces gradients over the replicas; they are of the mean over the global batch's samples. The
        host does not wait for the device. Statistics of norms are recorded, and not merged.
        """
        self.loss.begin(global_batch_size)
        self.gradient_buckets.zero(len(micro_batches))
        for norm in self.norms:
            norm.pending.clear()
        schedule = self.plan.schedules.training(len(micro_batches))
        with self._mode(trains=True):
            loss = self.executor.run(schedule, micro_batches).reshape(1)
        if self.ties is not None:
            self.ties.sum_gradients()
        largest = torch.finfo(self.context.numerics.dtype).max
        parts = {
            "loss": loss if self.reports else torch.zeros_like(loss),
            "stop_votes": torch.full_like(loss, float(self.wants_to_stop())),
            "findings": self.checks.count(),
            "overflows": self._overflows(largest, like=loss),
            "squares": self.gradient_norm.squares(),
            "metrics": self.loss.metrics if self.reports else torch.zeros_like(self.loss.metrics),
        }
        return StepSums.over_ranks(parts, largest, self.context.state.world)

    def _overflows(self, largest: float, like: Tensor) -> Tensor:
        """Number of recorded statistics that running statistics of the weights' type cannot take, `[1]`."""
        recorded = [value for norm in self.norms for record in norm.pending for value in record[:2]]
        if not recorded:
            return torch.zeros_like(like)
        found = torch.stack([each.double() for each in torch._foreach_norm(recorded, math.inf)])
        # Running statistics take unbiased variances, at most twice the biased ones.
        return (~(found <= largest / 2)).sum(0, keepdim=True, dtype=torch.float64)

    def check(self, sums: StepSums) -> StepFigures:
        """Reads the sums of a step. Raises ValueError on every rank for findings of one."""
        figures = sums.read()
        (self.stop_votes,) = figures.values["stop_votes"]
        if figures.values["findings"][0]:
            self._raise_findings()
        return figures

    def merge_statistics(self, most_micro_batches: int) -> None:
        """Merges the recorded statistics of a step into the norms' running statistics. Collective over the replicas.

        Args:
            most_micro_batches: of the step, on any replica.
        """
        of_owners = None if self.ties is None else self.ties.statistics_of_owners
        merge_running_statistics(self.norms, self.context.state.dp, most_micro_batches, of_owners)

    def refresh_copies(self) -> None:
        """Gives changed values from their owners to the replicas and to tied layers. Collective."""
        self.gradient_buckets.all_gather_params()
        if self.ties is not None:
            self.ties.refresh()

    def evaluate(self, micro_batches: Sequence[MicroBatchInput], consume: OutputConsumer) -> None:
        """Computes outputs without gradients. Raises ValueError on every rank for findings of one. Collective.

        Args:
            consume: called with the output for all time steps, and targets, on the ranks of the last stage.
        """
        if micro_batches:
            schedule = self.plan.schedules.evaluation(len(micro_batches))
            if self.loss.windows is not None:
                consume = partial(_consume_whole, self.loss.windows, consume)
            with self._mode(trains=False):
                self.executor.run(schedule, micro_batches, consume)
        findings = self.checks.count()
        vote = torch.full_like(findings, float(self.wants_to_stop()))
        self.stop_votes, found = all_reduce_sum(torch.cat([vote, findings]), self.context.state.world).tolist()
        if found:
            self._raise_findings()

    def run_again(self, micro_batches: Sequence[MicroBatchInput]) -> None:
        """Repeats the forward of the last step for its outputs; changes nothing that training keeps. Collective."""
        for norm in self.norms:
            norm.record_statistics(False)
        with self.checks.collecting():  # these findings were those of the step
            schedule = self.plan.schedules.evaluation(len(micro_batches))
            self.executor.run(schedule, micro_batches, lambda output, targets: None)

    @contextmanager
    def _mode(self, trains: bool) -> Iterator[None]:
        """Training or evaluation inside the block; windows leave no state behind."""
        for chunk in self.chunks.values():
            chunk.train(trains)
        for norm in self.norms:
            norm.record_statistics(trains)
        with self.checks.collecting(), self.context.cast_weights.caching():
            yield
        if self.loss.windows is not None:
            self.loss.windows.clear()
            for chunk in self.chunks.values():
                chunk.forget()

    def _raise_findings(self) -> None:
        """Raises ValueError on every rank, with the first finding of any."""
        of_ranks = gather(self.context.state.world.handle, self.checks.findings())
        first, *others = [each for findings in of_ranks for each in findings]
        with error_context(first.context):
            raise ValueError(f"{first.text}; and {len(others)} more" if others else first.text)

    def of_all_replicas(self, values: Tensor) -> Tensor:
        """Sum over all replicas of a tensor that is where their logits are. It may be changed in place. Collective."""
        return all_reduce_sum(values if self.reports else torch.zeros_like(values), self.context.state.world)


def _consume_whole(windows: WindowOutputs, consume: OutputConsumer, output: Bundle, targets: Any) -> None:
    whole = windows.complete(output)
    if whole is not None:
        consume(whole, targets)
