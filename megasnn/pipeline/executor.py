"""Works off a schedule, action by action: a small method for each kind, and no knowledge of any schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megasnn.bundle import map_entries
from megasnn.device_checks import at
from megasnn.models.description import Carried
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.boundaries import Boundaries
from megasnn.pipeline.chunk import PipelineChunk
from megasnn.pipeline.edges import without_graph
from megasnn.pipeline.graphs import ChunkGraphs
from megasnn.pipeline.interfaces import ActionObserver, GradientSync, LossFunction, OutputConsumer, WeightStore
from megasnn.pipeline.kept_input import KeptInput
from megasnn.pipeline.p2p import WireOptions
from megasnn.pipeline.step_state import MicroBatchInput, StepState
from megasnn.pipeline.transfers import Transfers
from megasnn.recompute import recording, replaying
from megasnn.schedule import Action, Kind, Schedule
from megasnn.schedule.actions import COMPUTE, RECEIVES, SENDS, USES_WEIGHTS
from megasnn.telemetry.ranges import is_traced, named
from megasnn.telemetry.timers import DeviceClock


class PipelineError(RuntimeError):
    """An action failed; the message names rank, stage, action and micro-batch.

    Attributes:
        place: these four.
    """

    def __init__(self, place: str, cause: Exception) -> None:
        super().__init__(f"{place}: {type(cause).__name__}: {cause}")
        self.place = place


class PipelineExecutor:
    """One for all schedules, a single rank included.

    Args:
        chunks: this rank's chunks by index.
        placement: the pipeline rank of every chunk.
        loss: for training; called on the rank of the last chunk, in each forward. It is to have no effects.
        seen: for training; called there as well, but not in a forward that is computed again.
        sync: data parallelism; None where gradients are not reduced.
        weights: where they are gathered when they are used; None where they are always there.
        observer: called after each action, in training and in evaluation. Nothing waits for it but the host.
        wires: how tensors travel between stages.
        waits: whether the device is waited for after each action, so that an error of a kernel is raised in the action
            that it arose in.
        wholes, boundaries: see Transfers.

    Attributes:
        observer: may be set and taken away between steps.
        clock: of its marks.
    """

    def __init__(
        self,
        chunks: dict[int, PipelineChunk],
        placement: Sequence[int],
        state: ParallelState,
        loss: LossFunction | None = None,
        sync: GradientSync | None = None,
        observer: ActionObserver | None = None,
        seen: OutputConsumer | None = None,
        wires: WireOptions = WireOptions(),  # noqa: B008  (frozen)
        waits: bool = False,
        wholes: Sequence[int] | None = None,
        weights: WeightStore | None = None,
        boundaries: Boundaries | None = None,
    ) -> None:
        self._chunks, self._placement, self._state = chunks, tuple(placement), state
        self._loss, self._sync, self._seen, self.observer = loss, sync, seen, observer
        self.clock, self._waits, self._weights = DeviceClock(state.device), waits, weights
        self._anchor = torch.zeros((), device=state.device, requires_grad=True)  # makes a chunk's input part of a graph
        self._consume: OutputConsumer | None = None
        self._current: Action | None = None
        self._trained: tuple[int, ...] = ()  # the sizes of the last step's micro-batches
        self._making: set[tuple[int, ...]] = set()  # of which steps will make CUDA graphs
        self._scattered: frozenset[int] = frozenset()  # chunks whose gradients are, after every micro-batch
        self._transfers = Transfers(self._placement, state, wires, wholes, boundaries)
        methods: dict[Kind, Callable[[StepState, Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._whole_backward,
            Kind.INPUT_GRADIENT: self._input_gradient,
            Kind.WEIGHT_GRADIENT: self._weight_gradient,
            Kind.RECOMPUTE: self._forward_again,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.RECV_FORWARD: self._receive_forward,
            Kind.SEND_BACKWARD: self._send_backward,
            Kind.RECV_BACKWARD: self._receive_backward,
            Kind.REDUCE_GRAD: self._sync_gradients,
            Kind.REDUCE_SCATTER: self._scatter_gradients,
            Kind.UNSHARD: self._gather_weights,
            Kind.RESHARD: self._free_weights,
        }
        self._methods = {kind: self._named(method) for kind, method in methods.items()}

    def train_step(self, schedule: Schedule, micro_batches: Sequence[MicroBatchInput]) -> Tensor:
        """Forward and backward of all micro-batches; gradients are accumulated and reduced.

        Returns:
            the sum of the losses, float64 scalar; zero on ranks without the last chunk.
        Raises:
            PipelineError: an action failed.
        """
        run = self._run(schedule, micro_batches, forward_only=False)
        total = torch.zeros((), dtype=torch.float64, device=self._state.device)
        for loss in run.losses:
            total += loss
        return total

    def evaluate(self, schedule: Schedule, micro_batches: Sequence[MicroBatchInput], consume: OutputConsumer) -> None:
        """Forward of all micro-batches; `consume` gets the outputs and labels on the rank of the last chunk."""
        self._consume = consume
        try:
            self._run(schedule, micro_batches, forward_only=True)
        finally:
            self._consume = None

    def _run(self, schedule: Schedule, micro_batches: Sequence[MicroBatchInput], forward_only: bool) -> StepState:
        if schedule.micro_batches != len(micro_batches) or schedule.placement != self._placement:
            raise ValueError(
                f"schedule for {schedule.micro_batches} micro-batches on placement {schedule.placement}, given "
                f"{len(micro_batches)} on {self._placement}"
            )
        sizes = tuple(micro.size for micro in micro_batches)
        makes_graphs = not forward_only and sizes in self._making
        if not forward_only:
            self._trained = sizes
            for graphs in self._graphs:
                graphs.begin(makes_graphs)
        actions = schedule.actions[self._state.pipeline.rank]
        repeated = frozenset(_key(each) for each in actions if each.kind is Kind.RECOMPUTE)
        self._scattered = frozenset(each.chunk for each in actions if each.kind is Kind.REDUCE_SCATTER)
        run = StepState(micro_batches, self._anchor, repeated)
        with torch.no_grad() if forward_only else nullcontext():
            self._transfers.begin(schedule, sizes, partial(self._expected, run), makes_graphs)
            for position, action in enumerate(actions):
                self._current = action
                start = None if self.observer is None else self.clock.mark()
                try:
                    if action.kind in COMPUTE:
                        self._transfers.announce(actions, position)
                    with at(partial(self._place, action)):
                        if self._weights is not None and action.kind in USES_WEIGHTS:
                            self._weights.wait_unshard(action.chunk)
                        self._methods[action.kind](run, action)
                    if self._waits:
                        self.clock.wait()
                except Exception as error:
                    raise PipelineError(self._place(action), error) from error
                if self.observer is not None and start is not None:
                    self.observer(action, start, self.clock.mark())
        self._transfers.wait()
        if self._sync is not None and not forward_only:
            self._sync.wait()
        self._current = None
        return run

    @property
    def lacks_graphs(self) -> bool:
        """Whether layers of this rank lacked CUDA graphs in the last step that they have in later ones."""
        return any(graphs.lacks for graphs in self._graphs)

    @property
    def _graphs(self) -> list[ChunkGraphs]:
        return [chunk.graphs for chunk in self._chunks.values() if chunk.graphs is not None]

    def make_graphs(self, makes: bool) -> None:
        """After a step, alike on all ranks: whether CUDA graphs are made in the next one with micro-batches of the same
        sizes."""
        (self._making.add if makes else self._making.discard)(self._trained)

    def place(self) -> str | None:
        """Rank, stage, action and micro-batch of now, or of what failed; None between steps. For another thread."""
        action = self._current
        return None if action is None else self._place(action)

    def _place(self, action: Action) -> str:
        where = self._state
        micro = "" if action.micro_batch is None else f", micro-batch {action.micro_batch}"
        return f"rank {where.rank}, pipeline stage {where.pipeline.rank}, action {action}{micro}"

    def _named(self, method: Callable[[StepState, Action], None]) -> Callable[[StepState, Action], None]:
        """The method; in a trace, with the names of the action and of the message that it sends or waits for."""

        def run(step: StepState, action: Action) -> None:
            if not is_traced():
                method(step, action)
                return
            with named(str(action)), named(self._message(action)) if action.kind in SENDS | RECEIVES else nullcontext():
                method(step, action)

        return run

    def _message(self, action: Action) -> str:
        chunk, comes = self._chunks[action.chunk], action.kind.is_receive
        forward = action.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
        carried = chunk.receives if comes == forward else chunk.hands_on
        what = ", ".join(each.name for each in carried)
        stage = self._placement[action.peer.chunk]
        gradient = "" if forward else "gradient of "
        return f"message {'from' if comes else 'to'} stage {stage}: {gradient}{what}"

    # --- computing

    def _forward(self, run: StepState, action: Action) -> None:
        key = _key(action)
        if key not in run.repeated:
            self._hand_on(run, key, self._output(run, key))
            return
        chunk = self._chunks[action.chunk]
        # What the first chunk takes stays in the batch.
        given, carried = ((), ()) if chunk.is_first else (run.inputs[key], chunk.receives)
        run.kept[key] = kept = KeptInput(given, carried)
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

    def _output(self, run: StepState, key: tuple[int, int]) -> Any:
        micro = run.micro_batches[key[1]]
        chunk = self._chunks[key[0]]
        graphs = chunk.graphs if torch.is_grad_enabled() else None
        with nullcontext() if graphs is None else graphs.begun(key[1]):
            return chunk(run.images(key[1]) if chunk.is_first else run.entered(key), micro.samples, micro.goes_on)

    def _hand_on(self, run: StepState, key: tuple[int, int], y: Any) -> None:
        """What becomes of a chunk's output in its first forward: the loss, or the input of the next chunk."""
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
        if self._placement[chunk + 1] == self._state.pipeline.rank:
            run.inputs[chunk + 1, micro_batch] = given
        else:
            run.outputs[key] = given

    def _loss_of(self, run: StepState, key: tuple[int, int], y: Any) -> Tensor:
        assert self._loss is not None
        return self._loss(y, run.labels(key[1]))

    def _whole_backward(self, run: StepState, action: Action) -> None:
        self._begin_gradients(action)
        self._backward(run, action)
        self._done(action)

    def _backward(self, run: StepState, action: Action) -> None:
        with self._chunks[action.chunk].weight_gradients.ranges.around():
            run.backward(_key(action))

    def _input_gradient(self, run: StepState, action: Action) -> None:
        self._begin_gradients(action, first_part=True)
        with self._chunks[action.chunk].weight_gradients.deferred() as tasks:
            self._backward(run, action)
        tasks.reverse()
        run.weight_gradients[_key(action)] = tasks

    def _weight_gradient(self, run: StepState, action: Action) -> None:
        self._begin_gradients(action)
        tasks = run.weight_gradients.pop(_key(action))
        while tasks:
            tasks.pop()()  # and its tensors are free
        self._done(action)

    def _begin_gradients(self, action: Action, first_part: bool = False) -> None:
        if self._sync is not None and action.chunk in self._scattered:
            self._sync.begin(action.chunk, first_part)

    def _done(self, action: Action) -> None:
        chunk, micro_batch = _key(action)
        graphs = self._chunks[chunk].graphs
        if graphs is not None:
            graphs.done(micro_batch)

    def _sync_gradients(self, run: StepState, action: Action) -> None:
        if self._sync is not None:
            self._sync.finish(action.chunk)

    def _scatter_gradients(self, run: StepState, action: Action) -> None:
        if self._sync is not None:
            self._sync.scatter(action.chunk)

    def _gather_weights(self, run: StepState, action: Action) -> None:
        if self._weights is not None:
            self._weights.unshard(action.chunk)

    def _free_weights(self, run: StepState, action: Action) -> None:
        if self._weights is not None:
            self._weights.reshard(action.chunk)

    # --- transfers

    def _send_forward(self, run: StepState, action: Action) -> None:
        self._transfers.send(action, run.outputs.pop(_key(action)), self._chunks[action.chunk].hands_on)

    def _send_backward(self, run: StepState, action: Action) -> None:
        key, receives = (action.chunk - 1, _key(action)[1]), self._chunks[action.chunk].receives
        self._transfers.send(action, run.gradients.pop(key), [receives[index] for index in run.learning.pop(key)])

    def _receive_forward(self, run: StepState, action: Action) -> None:
        run.inputs[_key(action)] = self._transfers.receive(action)

    def _receive_backward(self, run: StepState, action: Action) -> None:
        run.gradients[_key(action)] = self._transfers.receive(action)

    def _expected(self, run: StepState, receive: Action) -> Sequence[Carried]:
        """The tensors that a receive brings: gradients of what was handed on, once it was."""
        chunk = self._chunks[receive.chunk]
        if receive.kind is Kind.RECV_FORWARD:
            return chunk.receives
        return [chunk.hands_on[index] for index in run.learning.get(_key(receive), ())]


def _key(action: Action) -> tuple[int, int]:
    assert action.micro_batch is not None
    return action.chunk, action.micro_batch
