"""Runs any schedule's actions one by one. `StepState` holds the tensors between actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megasnn.common.bundle import Bundle
from megasnn.common.checks import error_context
from megasnn.common.recompute import recording, replaying
from megasnn.layers.neuron import NeuronLayer
from megasnn.parallel.fsdp import GatheredWeights
from megasnn.parallel.gradient_buckets import GradientBuckets
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.chunk import PipelineChunk
from megasnn.pipeline.graphs import ChunkGraphs
from megasnn.pipeline.microbatch_state import MicroBatchInput, OutputConsumer, PackedInput, StepState, without_graph
from megasnn.pipeline.p2p import Transfers
from megasnn.schedule import Action, Kind, Schedule
from megasnn.schedule.actions import COMPUTE, FINISHING, PROPAGATING, USES_WEIGHTS
from megasnn.telemetry.operations import not_counting
from megasnn.telemetry.timers import named

LossFunction = Callable[[Bundle, Any, bool], Tensor]
"""(output of the model, targets, is a recomputation) -> this micro-batch's share of the global batch's mean loss."""
_BACKWARDS = PROPAGATING | FINISHING
MOST_GRAPHED = 2
"""Number of step sizes with CUDA graphs, which take memory: the usual one, and a smaller last step of an epoch."""


class PipelineExecutor:
    """Errors name rank, stage, action and micro-batch.

    Args:
        segments: this rank's segments by schedule number.
        transfers: None for a single stage.
        loss: called on the last segment's rank, in each training forward.
        weights: sharded weights, gathered before use (UNSHARD, RESHARD); None for whole weights.
    """

    def __init__(
        self,
        segments: Mapping[int, PipelineChunk],
        state: ParallelState,
        transfers: Transfers | None,
        loss: LossFunction,
        gradient_buckets: GradientBuckets,
        weights: GatheredWeights | None = None,
    ) -> None:
        self._segments = segments
        self._state = state
        self._transfers = transfers
        self._loss = loss
        self._gradient_buckets = gradient_buckets
        self._weights = weights
        # A leaf with a gradient, which makes the detached input of a segment part of autograd's graph.
        self._anchor = torch.zeros((), device=state.device, requires_grad=True)
        self._neurons: list[NeuronLayer] = []
        for segment in segments.values():
            self._neurons += [module for module in segment.modules() if isinstance(module, NeuronLayer)]
        # Micro-batch sizes of the training steps so far: a step with new sizes runs without CUDA graphs. They count the
        # samples of all ranks, so that ranks which share a micro-batch capture and replay the same graphs.
        self._sizes: list[tuple[int, ...]] = []
        self._scattered: set[int] = set()  # segments whose gradients are scattered after every micro-batch
        self._methods: dict[Kind, Callable[[StepState, Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: lambda step, action: step.backward(action.key),
            Kind.INPUT_GRADIENT: self._input_gradient,
            Kind.WEIGHT_GRADIENT: self._weight_gradient,
            Kind.RECOMPUTE: self._forward_again,
            Kind.REDUCE_GRAD: lambda step, action: gradient_buckets.reduce(action.segment),
            Kind.REDUCE_SCATTER: lambda step, action: gradient_buckets.scatter(action.segment),
        }
        if transfers is not None:
            self._methods[Kind.SEND_FORWARD] = lambda step, action: transfers.send(action, step.outputs.pop(action.key))
            self._methods[Kind.RECV_FORWARD] = partial(self._receive_forward, transfers)
            self._methods[Kind.SEND_BACKWARD] = partial(self._send_backward, transfers)
            self._methods[Kind.RECV_BACKWARD] = partial(self._receive_backward, transfers)
        if weights is not None:
            self._methods[Kind.UNSHARD] = lambda step, action: weights.unshard(action.segment)
            self._methods[Kind.RESHARD] = lambda step, action: weights.reshard(action.segment)

    def run(
        self, schedule: Schedule, micro_batches: Sequence[MicroBatchInput], consume: OutputConsumer | None = None
    ) -> Tensor:
        """Runs a schedule on all micro-batches; accumulates and reduces gradients.

        Args:
            consume: in an evaluation, called with outputs and targets on the last segment's rank; None in training.
        Returns:
            Summed loss, float64 scalar; zero without the last segment, and in an evaluation.
        """
        actions = schedule.actions[self._state.pp.rank]
        sizes = tuple(micro.size for micro in micro_batches)
        recomputed = frozenset(each.key for each in actions if each.kind is Kind.RECOMPUTE)
        self._scattered = {each.segment for each in actions if each.kind is Kind.REDUCE_SCATTER}
        step = StepState(micro_batches, self._anchor, recomputed, consume)
        if self._transfers is not None:
            self._transfers.begin(schedule, sizes)
        graphs = [segment.graphs for segment in self._segments.values() if segment.graphs is not None]
        if graphs and consume is None:
            self._begin_graphs(graphs, tuple(micro.whole or micro.size for micro in micro_batches))
        with nullcontext() if consume is None else torch.no_grad():
            for action in actions:
                with error_context(partial(self._error_context, action)), named(action):
                    self._prepare(action)
                    self._methods[action.kind](step, action)
                    if graphs and action.kind in FINISHING:
                        self._end_graphs(action)
        # Messages may still be sent from tensors of the step, and buckets reduced.
        if self._transfers is not None:
            self._transfers.wait()
        if consume is None:
            self._gradient_buckets.wait()
        total = torch.zeros((), dtype=torch.float64, device=self._state.device)
        for loss in step.losses:
            total += loss
        return total

    def _begin_graphs(self, graphs: Sequence[ChunkGraphs], sizes: tuple[int, ...]) -> None:
        is_observed = any(neuron.is_observed for neuron in self._neurons)
        has_graphs = sizes in self._sizes[:MOST_GRAPHED] and not is_observed
        if sizes not in self._sizes:
            self._sizes.append(sizes)
        for each in graphs:
            each.begin(has_graphs, sizes)

    def _prepare(self, action: Action) -> None:
        if self._transfers is not None and action.kind in COMPUTE:
            self._transfers.announce(action)
        if self._weights is not None and action.kind in USES_WEIGHTS:
            self._weights.wait_unshard(action.segment)
        if action.segment in self._scattered and action.kind in _BACKWARDS:
            self._gradient_buckets.begin(action.segment, first_part=action.kind is Kind.INPUT_GRADIENT)

    def _end_graphs(self, action: Action) -> None:
        graphs = self._segments[action.segment].graphs
        if graphs is not None:
            graphs.done(action.key[1])

    def _error_context(self, action: Action) -> str:
        state = self._state
        micro = "" if action.micro_batch is None else f", micro-batch {action.micro_batch}"
        return f"rank {state.rank}, pipeline stage {state.pp.rank}, action {action}{micro}"

    def _forward(self, step: StepState, action: Action) -> None:
        key = action.key
        segment = self._segments[action.segment]
        micro = step.micro_batches[key[1]]
        stashed: PackedInput | None = None
        surroundings: AbstractContextManager[None] = nullcontext()
        if key in step.recomputed:
            if segment.is_first:
                # The input stays in the batch.
                stashed = PackedInput([], ())
            else:
                stashed = PackedInput(step.inputs[key], segment.receives)
            step.stashed[key] = stashed
            surroundings = recording(stashed.collected)
        elif micro.is_padding:
            surroundings = not_counting()
        with surroundings:
            x = micro.inputs if segment.is_first else step.entered(key)
            y = segment(x, micro.samples, micro.goes_on, key[1])
        if not segment.is_last:
            step.await_gradients(key, y)
            next_inputs = [without_graph(each) for each in y]
            if action.segment + 1 in self._segments:
                step.inputs[action.segment + 1, key[1]] = next_inputs
            else:
                step.outputs[key] = next_inputs
        elif step.consume is None:
            loss = self._loss(y, micro.targets, False)
            step.backwards[key] = partial(torch.autograd.backward, loss)
            step.losses.append(loss.detach())
        elif not micro.is_padding:
            step.consume(*micro.counted(y))
        if stashed is not None:
            # Frees the graph. It was needed to know which outputs require a gradient.
            del step.backwards[key]

    def _forward_again(self, step: StepState, action: Action) -> None:
        key = action.key
        segment = self._segments[action.segment]
        micro = step.micro_batches[key[1]]
        stashed = step.stashed.pop(key)
        if not segment.is_first:
            step.inputs[key] = stashed.restored()
        with segment.only_graph(), replaying(stashed.collected):
            x = micro.inputs if segment.is_first else step.entered(key)
            y = segment(x, micro.samples, micro.goes_on, key[1])
            if segment.is_last:
                loss = self._loss(y, micro.targets, True)
                step.backwards[key] = partial(torch.autograd.backward, loss)
            else:
                step.await_gradients(key, y)

    def _input_gradient(self, step: StepState, action: Action) -> None:
        with self._segments[action.segment].weight_gradients.deferred() as tasks:
            step.backward(action.key)
        step.weight_gradients[action.key] = tasks

    def _weight_gradient(self, step: StepState, action: Action) -> None:
        tasks = step.weight_gradients.pop(action.key)
        # Each task is freed with its tensors before the next one runs.
        while tasks:
            tasks.popleft()()

    def _send_backward(self, transfers: Transfers, step: StepState, action: Action) -> None:
        segment, micro_batch = action.key
        transfers.send(action, step.gradients.pop((segment - 1, micro_batch)))

    def _receive_forward(self, transfers: Transfers, step: StepState, action: Action) -> None:
        step.inputs[action.key] = [*transfers.receive(action).values()]

    def _receive_backward(self, transfers: Transfers, step: StepState, action: Action) -> None:
        """Drops gradients for outputs outside the graph."""
        gradients = transfers.receive(action)
        step.gradients[action.key] = [gradients[index] for index in step.learning.pop(action.key)]
