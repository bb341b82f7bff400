"""This rank's part of the model: runs a schedule, and gives its tensors to optimizer and checkpoint."""

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
from megasnn.common.checks import DeviceChecks, Finding, error_context
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
from megasnn.parallel.sync_batch_norm import RunningStatistics
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.chunk import PipelineChunk
from megasnn.pipeline.executor import PipelineExecutor
from megasnn.pipeline.microbatch_state import MicroBatchInput, OutputConsumer
from megasnn.pipeline.plan import PipelinePlan
from megasnn.pipeline.ties import Ties


@dataclass(kw_only=True)
class DistributedModel:
    """One rank's chunks, with gradients reduced over the replicas. Made by `assemble_model`.

    Attributes:
        takes_inputs: True in the first stage.
        gives_logits: True in the last stage, which computes the loss.
        reports: True on the first of all ranks with the same logits, tensor-parallel ones included.
        copies: tied tensors owned by other layers.
        owned: parts of `tensors` that this rank updates and saves: shards with ZeRO-1, otherwise all.
        stop_votes: ranks with a true `wants_to_stop` in the last call, the same on every rank.
    """

    description: ModelDescription
    context: BuildContext
    plan: PipelinePlan
    chunks: Mapping[int, PipelineChunk]
    takes_inputs: bool
    gives_logits: bool
    reports: bool
    tensors: Sequence[ShardedTensor]
    copies: Sequence[ShardedTensor]
    owned: Sequence[ShardedTensor]
    norms: Sequence[ParallelBatchNorm]
    gradient_buckets: GradientBuckets
    gradient_norm: GradientNorm
    running_statistics: RunningStatistics
    ties: Ties | None
    loss: MicroBatchLoss
    executor: PipelineExecutor
    checks: DeviceChecks
    wants_to_stop: Callable[[], bool] = lambda: False
    stop_votes: float = field(default=0.0, init=False)
    _trains: bool | None = field(default=None, init=False)  # the modules' mode; None if unknown

    @property
    def state(self) -> ParallelState:
        return self.context.state

    @property
    def parameters(self) -> int:
        return parameter_count(self.description.tensors)

    @property
    def trained_parameters(self) -> int:
        return parameter_count(entry for entry in self.description.tensors if entry.tensor.requires_grad)

    def neurons(self) -> list[tuple[str, NeuronLayer]]:
        """This rank's neurons by global name, in model order."""
        found = []
        for chunk in self.chunks.values():
            for name, layer in chunk.named_layers():
                for path, module in layer.named_modules(prefix=name):
                    if isinstance(module, NeuronLayer):
                        found.append((path, module))
        return found

    def run(self, micro_batches: Sequence[MicroBatchInput], global_batch_size: int) -> StepSums:
        """Forward and backward for this replica's micro-batches; sums the step over all ranks. Collective.

        Reduces gradients over the replicas. The host does not wait for the device. Norms record statistics for
        `running_statistics`.
        """
        self.loss.begin(global_batch_size)
        self.gradient_buckets.zero(len(micro_batches))
        for norm in self.norms:
            # Nothing merges the records of a step that was skipped.
            norm.pending.clear()
        # On one rank, unless flags ask for another: 0F0 0B0 0F1 0B1 ..., then 0REDUCE_GRAD; see schedule/actions.py.
        schedule = self.plan.schedules.training(len(micro_batches))
        with self._mode(trains=True):
            loss = self.executor.run(schedule, micro_batches).reshape(1)
        if self.ties is not None:
            self.ties.sum_gradients()
        largest = torch.finfo(self.context.numerics.dtype).max
        # Of ranks with the same logits, one counts. Everything else is this rank's own.
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
        recorded = [value for norm in self.norms for record in norm.pending for value in record[:2]]
        if not recorded:
            return torch.zeros_like(like)
        # One launch for all statistics: a norm of order infinity is the largest magnitude.
        found = torch.stack([each.double() for each in torch._foreach_norm(recorded, math.inf)])
        # Running variances are unbiased: n / (n - 1), at most twice the recorded ones. A nan is not smaller than
        # anything, so the comparison is negated.
        return (~(found <= largest / 2)).sum(0, keepdim=True, dtype=torch.float64)

    def read(self, sums: StepSums) -> StepFigures:
        """Reads a step's sums. Raises ValueError on every rank for findings on any."""
        figures = sums.read()
        (self.stop_votes,) = figures.values["stop_votes"]
        if figures.values["findings"][0]:
            self._raise_findings()
        return figures

    def refresh_copies(self) -> None:
        """Copies changed values to replicas and tied layers. Collective."""
        self.gradient_buckets.all_gather_params()
        if self.ties is not None:
            self.ties.refresh()

    def evaluate(self, micro_batches: Sequence[MicroBatchInput], consume: OutputConsumer) -> None:
        """Raises ValueError on every rank for findings on any. Collective.

        Args:
            consume: called in the last stage with all time steps' output, and the targets.
        """
        if micro_batches:
            schedule = self.plan.schedules.evaluation(len(micro_batches))
            if self.loss.windows is not None:
                consume = partial(_consume_whole, self.loss.windows, consume)
            with self._mode(trains=False):
                self.executor.run(schedule, micro_batches, consume)
        findings = self.checks.count()
        # One exchange for both: an evaluation waits once for each batch.
        vote = torch.full_like(findings, float(self.wants_to_stop()))
        self.stop_votes, found = all_reduce_sum(torch.cat([vote, findings]), self.context.state.world).tolist()
        if found:
            self._raise_findings()

    def sum_over_replicas(self, values: Tensor) -> Tensor:
        """Sums over the ranks with `reports`. May change the tensor in place. Collective."""
        if not self.reports:
            values = torch.zeros_like(values)
        return all_reduce_sum(values, self.context.state.world)

    def run_again(self, micro_batches: Sequence[MicroBatchInput]) -> None:
        """Repeats the last step's forward; training state stays. Collective."""
        for norm in self.norms:
            norm.record_statistics(False)
        # The modules stay in training mode, so that norms take the batch's statistics as the step did. Recording alone
        # is off, and the next step must turn it on.
        self._trains = None
        # Collected and dropped: a finding would have raised in the step.
        with self.checks.collecting():
            schedule = self.plan.schedules.evaluation(len(micro_batches))
            self.executor.run(schedule, micro_batches, lambda output, targets: None)

    @contextmanager
    def _mode(self, trains: bool) -> Iterator[None]:
        """Modules train or evaluate inside; findings and cast weights are collected. Windows leave no state behind."""
        # A step visits the modules only after an evaluation: Spikformer-8-512 has 180.
        if trains is not self._trains:
            for chunk in self.chunks.values():
                chunk.train(trains)
            for norm in self.norms:
                norm.record_statistics(trains)
            self._trains = trains
        with self.checks.collecting(), self.context.cast_weights.caching():
            yield
        if self.loss.windows is not None:
            self.loss.windows.clear()
            for chunk in self.chunks.values():
                chunk.forget()

    def _raise_findings(self) -> None:
        findings: list[Finding] = []
        for of_rank in gather(self.context.state.world.handle, self.checks.findings()):
            findings += of_rank
        first = findings[0]
        others = f"; and {len(findings) - 1} more" if len(findings) > 1 else ""
        with error_context(first.context):
            raise ValueError(first.text + others)


def _consume_whole(windows: WindowOutputs, consume: OutputConsumer, output: Bundle, targets: Any) -> None:
    whole = windows.complete(output)
    if whole is not None:
        consume(whole, targets)
