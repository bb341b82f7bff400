"""One rank's ends of all links of the pipeline, used action by action."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from megasnn.device_checks import explained
from megasnn.kernels.spike_codec import Content
from megasnn.models.description import Carried
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.arrivals import known_arrivals, needed_by_senders, sent_by_then
from megasnn.pipeline.boundaries import Boundaries
from megasnn.pipeline.p2p import Receiver, Sender, TensorDescriptor, WireOptions
from megasnn.schedule import Action, Kind, Schedule
from megasnn.schedule.actions import COMPUTE, PROPAGATING, SENDS


class Transfers:
    """A link is all that one rank sends to another, forward and backward, first in, first out. The tensors of one
    boundary follow each other.

    What travels between two ranks in the two directions has a queue each (megasnn/parallel_state.py): they are
    started here.

    Args:
        placement: the pipeline rank of every chunk.
        wholes: of every chunk, the number of the one that it is a unit of; None where each is one by itself.
        boundaries: what is known of the tensors before they are there; None: nothing.
    """

    def __init__(
        self,
        placement: Sequence[int],
        state: ParallelState,
        options: WireOptions,
        wholes: Sequence[int] | None = None,
        boundaries: Boundaries | None = None,
    ) -> None:
        self._boundaries, self._gradient_dtype = boundaries, options.gradient_dtype
        self._wholes = range(len(placement)) if wholes is None else wholes
        self._placement, self._rank = placement, state.pipeline.rank
        self._senders: dict[int, Sender] = {}  # by the peer's pipeline rank
        self._receivers: dict[int, Receiver] = {}
        up, down, wire = state.pipeline, state.downward, state.communicators.wire
        for low, high in linked(placement):
            state.communicators.start_messages(up, low, high)
            state.communicators.start_messages(down, high, low)
            if self._rank == low:
                self._senders[high] = Sender(up.ranks[high], up, wire, options)
                self._receivers[high] = Receiver(down.ranks[high], down, wire, state.device)
            elif self._rank == high:
                self._senders[low] = Sender(down.ranks[low], down, wire, options)
                self._receivers[low] = Receiver(up.ranks[low], up, wire, state.device)
        self._coming: dict[int, deque[Action]] = {}  # the receives of each link, in the order of the sends
        self._early: dict[Action, list[Tensor]] = {}  # what came before its turn
        self._posted: set[Action] = set()  # before their turn, as on their way for certain
        self._schedule: Schedule | None = None  # the last one, of which the next four are
        self._arrivals: Mapping[Action, int] = {}
        self._needed: Mapping[Action, int] = {}
        self._sent_by_then: Mapping[Action, Sequence[Action]] = {}
        self._sent: Mapping[int, list[Action]] = {}  # all receives of each link
        self._sizes: Sequence[int] = ()
        self._expected: Callable[[Action], Sequence[Carried]] = _nothing_yet
        # Of one kind are steps that train or evaluate on as many micro-batches of the same sizes.
        self._kind: Hashable = None  # of the step
        self._steps = Counter[Hashable]()  # that were done, of each kind
        self._takes_memory = False

    def begin(
        self,
        schedule: Schedule,
        sizes: Sequence[int],
        expected: Callable[[Action], Sequence[Carried]],
        makes_graphs: bool = False,
    ) -> None:
        """Before a step. Raises ValueError for layers that cannot take as many samples.

        Args:
            sizes: samples of each micro-batch.
            expected: what a receive brings, or the gradients of what; nothing as long as that is not known.
            makes_graphs: whether layers may get CUDA graphs in this step.
        """
        self._sizes, self._expected, self._early, self._posted = sizes, expected, {}, set()
        self._kind = torch.is_grad_enabled(), frozenset(sizes), len(sizes)
        # In the first step of a kind kernels are compiled and loaded. In the second one that trains, memory is taken
        # again, since the optimizer's state has some of what activations had.
        first_steps = 2 if torch.is_grad_enabled() else 1
        self._takes_memory = makes_graphs or self._steps[self._kind] < first_steps
        if self._boundaries is not None and self._senders:
            self._boundaries.find(sizes)
        if schedule is not self._schedule:  # large ones take a second to read
            self._schedule, self._arrivals = schedule, known_arrivals(schedule, self._rank)
            self._needed = needed_by_senders(schedule, self._rank)
            self._sent_by_then = sent_by_then(schedule, self._rank)
            self._sent = {peer: self._sent_by(schedule.actions[peer]) for peer in self._receivers}
        self._coming = {peer: deque(sent) for peer, sent in self._sent.items()}

    def _sent_by(self, actions: Sequence[Action]) -> list[Action]:
        """The receives of what a peer sends to this rank."""
        sent = (action.peer for action in actions if action.kind in SENDS)
        return [receive for receive in sent if self._placement[receive.chunk] == self._rank]

    def send(self, action: Action, tensors: Sequence[Tensor], carried: Sequence[Carried]) -> None:
        """Does not wait for the peer. Raises ValueError as `Sender.send` does, or notes it, and names the tensor.

        Args:
            carried: what the tensors are, or what they are the gradients of, which are dense.
        """
        sender = self._senders[self._peer(action)]
        sender.begin()
        forward = action.kind is Kind.SEND_FORWARD
        direction = "forward" if forward else "backward"
        for index, (tensor, each) in enumerate(zip(tensors, carried, strict=True)):
            name = each.name if forward else f"gradient of {each.name}"
            format = each.content if forward else Content.DENSE
            expected = self._planned(action, each, forward) or format
            with explained(partial("{1}: {0}".format, name)):
                sender.send(self._key(action, index), tensor, expected, direction)

    def _planned(self, action: Action, carried: Carried, forward: bool) -> TensorDescriptor | None:
        """What is known of a tensor, or of its gradient, before it is there, in the format in which it travels."""
        assert action.micro_batch is not None
        if self._boundaries is None:
            return None
        planned = self._boundaries.planned(carried, self._sizes[action.micro_batch])
        if planned is None:
            return None
        if forward:
            return replace(planned, content=carried.content)
        return replace(planned, sent_as=self._gradient_dtype or planned.dtype, learns=False)

    def announce(self, actions: Sequence[Action], position: int) -> None:
        """Posts what this rank receives between the computation at `position` and the next one, so that it arrives
        meanwhile. Not earlier: a receive that is posted takes a part of a GPU until its data come. And not what can be
        sent only after that computation: whatever waits for the whole GPU in it (an allocator that frees memory, a
        module that is loaded) would wait for ever. Two ranks could still wait for each other. So where kernels are
        loaded or memory is taken, only that is posted which is on its way for certain."""
        if self._takes_memory:
            self._post_what_was_sent(actions[position])
            return
        for index in range(position + 1, len(actions)):
            action = actions[index]
            if action.kind in COMPUTE:
                if not self._belong_together(actions[position], action):
                    return
                continue
            if action.kind.is_receive and action not in self._early:
                peer = self._peer(action)
                first = self._coming[peer][0]
                expected = self._expected(first)
                if not self._receivers[peer].is_posted and expected and self._needed[first] <= position:
                    forward = first.kind is Kind.RECV_FORWARD
                    self._receivers[peer].post(self._key(first, 0), self._planned(first, expected[0], forward))

    def receive(self, action: Action) -> list[Tensor]:
        """Waits for the tensors, and for those that their sender sends before them."""
        if self._takes_memory:
            self._post_what_was_sent(action)
        peer = self._peer(action)
        coming, receiver = self._coming[peer], self._receivers[peer]
        while action not in self._early:
            first = coming.popleft()
            forward = first.kind is Kind.RECV_FORWARD
            let_go = partial(self._senders[peer].arrived, self._arrivals[first])
            self._early[first] = [
                receiver.receive(self._key(first, index), let_go, self._planned(first, each, forward))
                for index, each in enumerate(self._expected(first))
            ]
            let_go()
        return self._early.pop(action)

    def _post_what_was_sent(self, action: Action) -> None:
        """Posts what others have sent before this rank comes to an action, whatever any rank waits for: a send that
        nobody receives holds up those that wait for their whole GPU just as a receive does that nobody sends."""
        for receive in self._sent_by_then.get(action, ()):
            peer, forward = self._peer(receive), receive.kind is Kind.RECV_FORWARD
            planned = [self._planned(receive, each, forward) for each in self._expected(receive)]
            before = islice(self._coming[peer], self._coming[peer].index(receive))
            if all(planned) and self._posted.issuperset(before):  # others are told first, and those behind them wait
                for index, each in enumerate(planned):
                    self._receivers[peer].post(self._key(receive, index), each)
                self._posted.add(receive)

    def wait(self) -> None:
        """Until everything sent has left. What only the step knew is let go, and its tensors with it."""
        for sender in self._senders.values():
            sender.wait()
        self._steps[self._kind] += 1
        self._sizes, self._expected = (), _nothing_yet

    def _belong_together(self, first: Action, second: Action) -> bool:
        """Whether two computations are of units of one chunk, and parts of one forward, or of one backward."""
        kinds = {first.kind, second.kind}
        same_chunk = self._wholes[first.chunk] == self._wholes[second.chunk]
        same_pass = len(kinds) == 1 or kinds <= PROPAGATING | {Kind.RECOMPUTE}
        return same_chunk and same_pass and first.micro_batch == second.micro_batch

    def _peer(self, action: Action) -> int:
        return self._placement[action.peer.chunk]

    def _key(self, action: Action, index: int) -> tuple[int, int, int, bool]:
        """Tensors of one place at one boundary and one number of samples have the same shape: one descriptor serves
        them all. It says whether they need a gradient, which differs in training and evaluation."""
        assert action.micro_batch is not None
        boundary = min(action.chunk, action.peer.chunk)
        return boundary, index, self._sizes[action.micro_batch], torch.is_grad_enabled()


def _nothing_yet(receive: Action) -> Sequence[Carried]:
    return ()


def linked(placement: Sequence[int]) -> list[tuple[int, int]]:
    """The pairs of pipeline ranks that send to each other, in ascending order."""
    pairs = zip(placement, placement[1:], strict=False)
    return sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]})
