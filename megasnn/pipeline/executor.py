"""Runs any schedule's actions one by one. `StepState` holds the tensors between actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megasnn.common.bundle import Bundle
from megasnn.common.checks import error_context
from megasnn.common.recompute import recording_collectives, replaying_collectives
from megasnn.layers.neuron import NeuronLayer
from megasnn.parallel.fsdp import GatheredWeights
from megasnn.parallel.gradient_buckets import GradientBuckets
from megasnn.parallel.traffic import traffic
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.chunk import PipelineChunk
from megasnn.pipeline.graphs import ChunkGraphs
from megasnn.pipeline.microbatch_state import MicroBatchInput, OutputConsumer, PackedInput, StepState
from megasnn.pipeline.p2p import Transfers
from megasnn.schedule import Action, Kind, Schedule
from megasnn.schedule.actions import COMPUTE, FINISHING, PROPAGATING, SENDS, SHARDING, USES_WEIGHTS, ActionKey
from megasnn.telemetry.operations import not_counting
from megasnn.telemetry.timers import Timers, is_traced, named

LossFunction = Callable[[Bundle, Any, bool], Tensor]
"""(output of the model, targets, is a recomputation) -> this micro-batch's share of the global batch's mean loss."""
ActionCall = Callable[[], object]
PreparedOrder = list[tuple[Action, list[ActionCall]]]
"""A rank's actions, each with the calls that perform it."""
_PHASES = {
    **dict.fromkeys((Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_FORWARD), "forward"),
    **dict.fromkeys(SHARDING, "weights"),
}
"""Phase for counted traffic; all other actions are part of the backward."""
_TIMED = {
    Kind.FORWARD: "forward",
    **dict.fromkeys((Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT), "backward"),
    Kind.RECOMPUTE: "recompute",
}
"""Part of a step that an action's time counts to; all other actions are transfers between ranks."""
_BACKWARDS = PROPAGATING | FINISHING
MOST_GRAPHED = 2
"""Number of step sizes with CUDA graphs, which take memory: the usual one, and a smaller last step of an epoch."""


class PipelineExecutor:
    """Runs this rank's actions of a schedule. Errors name rank, stage, action and micro-batch.

    The calls of a schedule's actions are prepared in its first run, so that a step decides nothing again.

    Args:
        segments: the chunk of each of this rank's segments, by the segment's number in the schedule.
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
        self._step = StepState(torch.zeros((), device=state.device, requires_grad=True))
        self._neurons: list[NeuronLayer] = []
        for chunk in segments.values():
            self._neurons += [module for module in chunk.modules() if isinstance(module, NeuronLayer)]
        # Micro-batch sizes of the training steps so far: a step with new sizes runs without CUDA graphs. They count the
        # samples of all ranks, so that ranks which share a micro-batch capture and replay the same graphs.
        self._sizes: list[tuple[int, ...]] = []
        # The last schedule of training, and the last one of evaluation.
        self._prepared: dict[bool, tuple[Schedule, PreparedOrder]] = {}
        self._timers: Timers | None = None

    def run(
        self, schedule: Schedule, micro_batches: Sequence[MicroBatchInput], consume: OutputConsumer | None = None
    ) -> Tensor:
        """Runs a schedule on all micro-batches; accumulates and reduces gradients.

        Args:
            consume: in an evaluation, called with outputs and targets on the last segment's rank; None in training.
        Returns:
            Summed loss, float64 scalar; zero without the last segment, and in an evaluation.
        """
        order = self.prepared(schedule)
        sizes = tuple([micro.size for micro in micro_batches])
        step = self._step
        step.reset(micro_batches, consume)
        if self._transfers is not None:
            self._transfers.begin(schedule, sizes)
        graphs = [chunk.graphs for chunk in self._segments.values() if chunk.graphs is not None]
        if graphs and consume is None:
            self._begin_cuda_graphs(graphs, tuple(micro.total_size or micro.size for micro in micro_batches))
        # Only a profiler sees the names of actions, and each costs two calls of Python.
        if is_traced():
            order = [(action, [partial(_in_trace, action, calls)]) for action, calls in order]
        if self._timers is not None:
            order = [(action, [partial(_timed, self._timers, action, calls)]) for action, calls in order]
        with error_context("") as context, nullcontext() if consume is None else torch.no_grad():
            for action, calls in order:
                traffic.phase = _PHASES.get(action.kind, "backward")
                context.describe = partial(self._describe, action)
                for call in calls:
                    call()
        traffic.phase = "step"
        # Messages may still be sent from tensors of the step, and buckets reduced.
        if self._transfers is not None:
            self._transfers.wait()
        if consume is None:
            self._gradient_buckets.wait()
        total = torch.zeros((), dtype=torch.float64, device=self._state.device)
        for loss in step.losses:
            total += loss
        step.reset()
        return total

    @contextmanager
    def timed_by(self, timers: Timers) -> Iterator[None]:
        """Times the actions inside, as forward, backward, recompute or transfers."""
        self._timers = timers
        try:
            yield
        finally:
            self._timers = None

    def prepared(self, schedule: Schedule) -> PreparedOrder:
        """This rank's actions with the calls that perform them, found in the schedule's first run."""
        last = self._prepared.get(schedule.forward_only)
        if last is not None and last[0] is schedule:
            return last[1]
        actions = schedule.actions[self._state.pp.rank]
        recomputed = {each.key for each in actions if each.kind is Kind.RECOMPUTE}
        # Segments whose gradients are scattered after every micro-batch.
        scattered = {each.segment for each in actions if each.kind is Kind.REDUCE_SCATTER}
        order: PreparedOrder = []
        for action in actions:
            if action.kind not in COMPUTE:
                order.append((action, [self._exchange(action)]))
                continue
            segment, micro_batch = action.key
            calls = self._before_computation(action, segment in scattered)
            calls.append(self._computation(action, action.key in recomputed))
            graphs = self._segments[segment].graphs
            if graphs is not None and action.kind in FINISHING:
                # After the backward another micro-batch may use the slot of this one.
                calls.append(partial(graphs.free_slot, micro_batch))
            order.append((action, calls))
        self._prepared[schedule.forward_only] = schedule, order
        return order

    def _before_computation(self, action: Action, is_scattered: bool) -> list[ActionCall]:
        """Calls for the computation's messages, weights and buckets.

        Args:
            is_scattered: the segment's gradients are scattered after every micro-batch.
        """
        calls: list[ActionCall] = []
        if self._transfers is not None:
            # Receives are posted before a computation, so that messages arrive during it.
            calls.append(partial(self._transfers.announce, action))
        if self._weights is not None and action.kind in USES_WEIGHTS:
            # An earlier UNSHARD has started the gather.
            calls.append(partial(self._weights.wait_unshard, action.segment))
        if is_scattered and action.kind in _BACKWARDS:
            is_first = action.kind is Kind.INPUT_GRADIENT
            calls.append(partial(self._gradient_buckets.begin, action.segment, first_part=is_first))
        return calls

    def _computation(self, action: Action, is_recomputed: bool) -> ActionCall:
        """The call for the computation.

        Args:
            is_recomputed: a later action computes this forward again.
        """
        key = action.key
        chunk = self._segments[action.segment]
        match action.kind:
            case Kind.FORWARD if is_recomputed:
                return partial(self._first_forward, chunk, key)
            case Kind.FORWARD:
                return partial(self._forward, chunk, key)
            case Kind.RECOMPUTE:
                return partial(self._forward_again, chunk, key)
            case Kind.BACKWARD:
                return partial(self._step.backward, key)
            case Kind.INPUT_GRADIENT:
                return partial(self._input_gradient, chunk, key)
            case _:
                assert action.kind is Kind.WEIGHT_GRADIENT, action
                return partial(self._weight_gradient, key)

    def _exchange(self, action: Action) -> ActionCall:
        """The call of an action that only communicates."""
        if action.kind is Kind.REDUCE_GRAD:
            return partial(self._gradient_buckets.reduce, action.segment)
        if action.kind is Kind.REDUCE_SCATTER:
            return partial(self._gradient_buckets.scatter, action.segment)
        if action.kind in SHARDING:
            assert self._weights is not None, action
            move = self._weights.unshard if action.kind is Kind.UNSHARD else self._weights.reshard
            return partial(move, action.segment)
        assert self._transfers is not None, action
        transfer = self._send if action.kind in SENDS else self._receive
        return partial(transfer, self._transfers, action)

    def _begin_cuda_graphs(self, graphs: Sequence[ChunkGraphs], sizes: tuple[int, ...]) -> None:
        is_observed = any(neuron.is_observed for neuron in self._neurons)
        has_graphs = sizes in self._sizes[:MOST_GRAPHED] and not is_observed
        if sizes not in self._sizes:
            self._sizes.append(sizes)
        for each in graphs:
            each.begin(has_graphs, sizes)

    def _describe(self, action: Action) -> str:
        micro = "" if action.micro_batch is None else f", micro-batch {action.micro_batch}"
        return f"rank {self._state.world.rank}, pipeline stage {self._state.pp.rank}, action {action}{micro}"

    def _forward(self, chunk: PipelineChunk, key: ActionKey) -> None:
        step = self._step
        segment, micro_batch = key
        micro = step.micro_batches[micro_batch]
        x = step.take_inputs(key)
        targets = None if micro.predicts else micro.targets
        # `chunk.forward`, not `chunk`: a call of the module would look for hooks, and a chunk has none.
        if micro.is_padding:
            with not_counting():
                y = chunk.forward(x, micro.samples, micro.goes_on, micro_batch, targets)
        else:
            y = chunk.forward(x, micro.samples, micro.goes_on, micro_batch, targets)
        if not chunk.is_last:
            step.await_gradients(key, y)
            step.hand_on(key, y, segment + 1 in self._segments)
        elif step.consume is None:
            loss = self._loss(y, micro.targets, False)
            step.ends[key] = loss
            step.losses.append(loss.detach())
        elif not micro.is_padding:
            step.consume(*micro.counted(y))

    def _first_forward(self, chunk: PipelineChunk, key: ActionKey) -> None:
        # A later action recomputes this forward: its graph is freed.
        step = self._step
        # The first segment's input stays in the batch.
        stashed = PackedInput([], ()) if chunk.is_first else PackedInput(step.inputs[key], chunk.receives)
        step.stashed[key] = stashed
        segment, micro_batch = key
        micro = step.micro_batches[micro_batch]
        x = step.take_inputs(key)
        with recording_collectives(stashed.collective_cache):
            y = chunk.forward(x, micro.samples, micro.goes_on, targets=micro.targets)
        if chunk.is_last:
            step.losses.append(self._loss(y, micro.targets, False).detach())
        else:
            # The graph was needed to know which outputs require a gradient.
            step.hand_on(key, y, segment + 1 in self._segments)

    def _forward_again(self, chunk: PipelineChunk, key: ActionKey) -> None:
        step = self._step
        stashed = step.stashed.pop(key)
        if not chunk.is_first:
            step.inputs[key] = stashed.restored()
        _, micro_batch = key
        micro = step.micro_batches[micro_batch]
        x = step.take_inputs(key)
        # The last neurons need not fire: their spikes have left the chunk.
        with chunk.explained, chunk.without_spikes(), replaying_collectives(stashed.collective_cache):
            y = chunk.forward(x, micro.samples, micro.goes_on, targets=micro.targets)
            if chunk.is_last:
                step.ends[key] = self._loss(y, micro.targets, True)
            else:
                step.await_gradients(key, y)

    def _input_gradient(self, chunk: PipelineChunk, key: ActionKey) -> None:
        with chunk.weight_gradients.deferring() as tasks:
            self._step.backward(key)
        self._step.weight_gradients[key] = tasks

    def _weight_gradient(self, key: ActionKey) -> None:
        tasks = self._step.weight_gradients.pop(key)
        # A task adds to gradients, and may read tensors that require one: outside a backward autograd would record it.
        with torch.no_grad():
            # Each task is freed with its tensors before the next one runs.
            while tasks:
                tasks.popleft()()

    def _send(self, transfers: Transfers, action: Action) -> None:
        segment, micro_batch = action.key
        if action.kind is Kind.SEND_FORWARD:
            tensors: Sequence[Tensor] = self._step.outputs.pop(action.key)
        else:
            tensors = self._step.gradients.pop((segment - 1, micro_batch))
        transfers.send(action, tensors)

    def _receive(self, transfers: Transfers, action: Action) -> None:
        tensors = transfers.receive(action)
        if action.kind is Kind.RECV_FORWARD:
            self._step.inputs[action.key] = [*tensors.values()]
        else:
            # Outputs outside the graph take no gradient.
            self._step.gradients[action.key] = [tensors[index] for index in self._step.needing_grad.pop(action.key)]


def _timed(timers: Timers, action: Action, calls: Sequence[ActionCall]) -> None:
    with timers(_TIMED.get(action.kind, "transfers")):
        for call in calls:
            call()


def _in_trace(action: Action, calls: Sequence[ActionCall]) -> None:
    with named(action):
        for call in calls:
            call()
