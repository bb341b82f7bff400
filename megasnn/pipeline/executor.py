"""Works off a schedule, action by action: a small method for each kind, and no knowledge of any schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megasnn.bundle import Bundle, map_entries
from megasnn.device_checks import placed
from megasnn.layers.neuron import NeuronLayer
from megasnn.parallel.fsdp import GatheredWeights
from megasnn.parallel.gradient_buckets import GradientBuckets
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.chunk import PipelineChunk
from megasnn.pipeline.microbatch_state import Key, MicroBatchInput, StepState, without_graph
from megasnn.pipeline.p2p import Transfers
from megasnn.pipeline.recompute import PackedInput
from megasnn.recompute import recording, replaying
from megasnn.schedule import Action, Kind, Schedule
from megasnn.schedule.actions import COMPUTE, USES_WEIGHTS
from megasnn.telemetry.ranges import named

LossFunction = Callable[[Bundle, Tensor], Tensor]
"""(output of the model, labels) -> this micro-batch's share of the global batch's mean loss, a scalar."""
OutputConsumer = Callable[[Bundle, Tensor], None]
"""Called with (output without gradient, labels), once for each micro-batch."""


MOST_GRAPHED = 2  # sizes of steps with CUDA graphs, each of which takes memory: the usual one, and a smaller last one


class PipelineExecutor:
    """Executor of any schedule, on a single rank, too. An error notes rank, stage, action and micro-batch.

    Args:
        chunks: this rank's chunks by index.
        loss: for training; called on the rank of the last chunk, in each forward. It is to have no effects.
        seen: for training; called there as well, but not in a forward that is computed again.
        sync: data parallelism; None where gradients are not reduced.
        weights: gathers weights when they are used; None where they are always there.

    Attributes:
        observer: called with each action behind it, in training and in evaluation.
    """

    def __init__(
        self,
        chunks: Mapping[int, PipelineChunk],
        state: ParallelState,
        transfers: Transfers,
        loss: LossFunction | None = None,
        sync: GradientBuckets | None = None,
        seen: OutputConsumer | None = None,
        weights: GatheredWeights | None = None,
    ) -> None:
        self._chunks, self._state, self._transfers = chunks, state, transfers
        self._loss, self._sync, self._seen, self._weights = loss, sync, seen, weights
        self.observer: Callable[[Action], None] | None = None
        self._anchor = torch.zeros((), device=state.device, requires_grad=True)  # makes a chunk's input part of a graph
        self._consume: OutputConsumer | None = None
        modules = [module for chunk in chunks.values() for module in chunk.modules()]
        self._neurons = [module for module in modules if isinstance(module, NeuronLayer)]
        self._sizes: list[tuple[int, ...]] = []  # of micro-batches in training steps
        self._scattered: frozenset[int] = frozenset()  # chunks whose gradients are, after every micro-batch
        self._methods: dict[Kind, Callable[[StepState, Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._whole_backward,
            Kind.INPUT_GRADIENT: self._input_gradient,
            Kind.WEIGHT_GRADIENT: self._weight_gradient,
            Kind.RECOMPUTE: self._forward_again,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.RECV_FORWARD: self._receive_forward,
            Kind.SEND_BACKWARD: self._send_backward,
            Kind.RECV_BACKWARD: self._receive_backward,
            Kind.REDUCE_GRAD: self._share,
            Kind.REDUCE_SCATTER: self._share,
            Kind.UNSHARD: self._share,
            Kind.RESHARD: self._share,
        }

    def train_step(self, schedule: Schedule, micro_batches: Sequence[MicroBatchInput]) -> Tensor:
        """Forward and backward of all micro-batches; gradients are accumulated and reduced.

        Returns:
            the sum of the losses, float64 scalar; zero on ranks without the last chunk.
        """
        run = self._run(schedule, micro_batches, trains=True)
        total = torch.zeros((), dtype=torch.float64, device=self._state.device)
        for loss in run.losses:
            total += loss
        return total

    def evaluate(self, schedule: Schedule, micro_batches: Sequence[MicroBatchInput], consume: OutputConsumer) -> None:
        """Forward of all micro-batches; `consume` gets the outputs and labels on the rank of the last chunk."""
        self._consume = consume
        try:
            self._run(schedule, micro_batches, trains=False)
        finally:
            self._consume = None

    def _run(self, schedule: Schedule, micro_batches: Sequence[MicroBatchInput], trains: bool) -> StepState:
        actions = schedule.actions[self._state.pp.rank]
        repeated = frozenset(_key(each) for each in actions if each.kind is Kind.RECOMPUTE)
        self._scattered = frozenset(each.chunk for each in actions if each.kind is Kind.REDUCE_SCATTER)
        run = StepState(micro_batches, self._anchor, repeated)
        with nullcontext() if trains else torch.no_grad():
            self._begin(schedule, tuple(micro.size for micro in micro_batches), trains)
            for action in actions:
                with placed(partial(self._place, action)):
                    self._do(run, action)
                if self.observer is not None:
                    self.observer(action)
        self._transfers.wait()
        if self._sync is not None and trains:
            self._sync.wait()
        return run

    def _begin(self, schedule: Schedule, sizes: tuple[int, ...], trains: bool) -> None:
        """Begins a step. The first training step of its sizes has no CUDA graphs: kernels are compiled in it."""
        self._transfers.begin(schedule, sizes)
        if not trains:
            return
        observes = any(neuron.is_observed for neuron in self._neurons)
        has_graphs = sizes in self._sizes[:MOST_GRAPHED] and not observes
        self._sizes += [sizes] * (sizes not in self._sizes)
        for chunk in self._chunks.values():
            if chunk.graphs is not None:
                chunk.graphs.begin(has_graphs)

    def _do(self, run: StepState, action: Action) -> None:
        if action.kind in COMPUTE:
            self._transfers.announce(action)
        if self._weights is not None and action.kind in USES_WEIGHTS:
            self._weights.wait_unshard(action.chunk)
        with named(str(action)):
            self._methods[action.kind](run, action)

    def _place(self, action: Action) -> str:
        state = self._state
        micro = "" if action.micro_batch is None else f", micro-batch {action.micro_batch}"
        return f"rank {state.rank}, pipeline stage {state.pp.rank}, action {action}{micro}"

    # --- computing

    def _forward(self, run: StepState, action: Action) -> None:
        key = _key(action)
        if key not in run.repeated:
            self._hand_on(run, key, self._output(run, key))
            return
        chunk = self._chunks[action.chunk]
        # What the first chunk takes stays in the batch.
        given, carried = ((), ()) if chunk.is_first else (run.inputs[key], chunk.receives)
        run.kept[key] = kept = PackedInput(given, carried)
        with recording(kept.findings):
            y = self._output(run, key)
        self._hand_on(run, key, y)
        del run.backwards[key]  # and with it the graph; it has shown what needs a gradient

    def _forward_again(self, run: StepState, action: Action) -> None:
        key = _key(action)
        chunk, kept = self._chunks[action.chunk], run.kept.pop(key)
        if not chunk.is_first:
            run.inputs[key] = kept.restored()
        with chunk.only_graph(), replaying(kept.findings):
            y = self._output(run, key)
            if chunk.is_last:
                run.backwards[key] = partial(torch.autograd.backward, self._loss_of(run, key, y))
            else:
                run.await_gradients(key, y)

    def _output(self, run: StepState, key: Key) -> Any:
        chunk, micro = self._chunks[key[0]], run.micro_batches[key[1]]
        x = run.images(key[1]) if chunk.is_first else run.entered(key)
        return chunk(x, micro.samples, micro.goes_on, key[1])

    def _hand_on(self, run: StepState, key: Key, y: Any) -> None:
        """Takes a chunk's output in its first forward: for the loss, or as the input of the next chunk."""
        chunk, micro_batch = key
        if self._chunks[chunk].is_last and self._consume is not None:
            if not run.micro_batches[micro_batch].is_padding:
                self._consume(y, run.labels(micro_batch))
            return
        if self._chunks[chunk].is_last:
            loss = self._loss_of(run, key, y)
            run.backwards[key] = partial(torch.autograd.backward, loss)
            run.losses.append(loss.detach())
            if self._seen is not None:
                self._seen(map_entries(Tensor.detach, y), run.labels(micro_batch))
            return
        run.await_gradients(key, y)
        given = [without_graph(each) for each in y]
        if self._transfers.placement[chunk + 1] == self._state.pp.rank:
            run.inputs[chunk + 1, micro_batch] = given
        else:
            run.outputs[key] = given

    def _loss_of(self, run: StepState, key: Key, y: Any) -> Tensor:
        assert self._loss is not None
        return self._loss(y, run.labels(key[1]))

    def _whole_backward(self, run: StepState, action: Action) -> None:
        self._begin_gradients(action)
        run.backward(_key(action))
        self._chunks[action.chunk].finished(_key(action)[1])

    def _input_gradient(self, run: StepState, action: Action) -> None:
        self._begin_gradients(action, first_part=True)
        with self._chunks[action.chunk].weight_gradients.deferred() as tasks:
            run.backward(_key(action))
        tasks.reverse()
        run.weight_gradients[_key(action)] = tasks

    def _weight_gradient(self, run: StepState, action: Action) -> None:
        self._begin_gradients(action)
        tasks = run.weight_gradients.pop(_key(action))
        while tasks:
            tasks.pop()()  # and its tensors are free
        self._chunks[action.chunk].finished(_key(action)[1])

    # --- data parallelism

    def _begin_gradients(self, action: Action, first_part: bool = False) -> None:
        if self._sync is not None and action.chunk in self._scattered:
            self._sync.begin(action.chunk, first_part)

    def _share(self, run: StepState, action: Action) -> None:
        """Reduces and scatters gradients, gathers and frees weights; nothing on a replica that is alone."""
        if self._sync is not None and action.kind is Kind.REDUCE_GRAD:
            self._sync.finish(action.chunk)
        elif self._sync is not None and action.kind is Kind.REDUCE_SCATTER:
            self._sync.scatter(action.chunk)
        elif self._weights is not None and action.kind is Kind.UNSHARD:
            self._weights.unshard(action.chunk)
        elif self._weights is not None and action.kind is Kind.RESHARD:
            self._weights.reshard(action.chunk)

    # --- transfers

    def _send_forward(self, run: StepState, action: Action) -> None:
        self._transfers.send(action, run.outputs.pop(_key(action)))

    def _send_backward(self, run: StepState, action: Action) -> None:
        self._transfers.send(action, run.gradients.pop((action.chunk - 1, _key(action)[1])))

    def _receive_forward(self, run: StepState, action: Action) -> None:
        run.inputs[_key(action)] = self._transfers.receive(action)

    def _receive_backward(self, run: StepState, action: Action) -> None:
        """Gradients come for all that may learn; a layer may have cut some of it off."""
        chunk, micro_batch = _key(action)
        came = dict(zip(
            self._transfers.learning(self._chunks[chunk].hands_on, micro_batch), self._transfers.receive(action),
            strict=True,
        ))  # fmt: skip
        run.gradients[chunk, micro_batch] = [came[index] for index in run.learning.pop((chunk, micro_batch))]


def _key(action: Action) -> Key:
    assert action.micro_batch is not None
    return action.chunk, action.micro_batch
