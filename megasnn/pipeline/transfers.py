"""One rank's ends of all links of the pipeline, used action by action."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from megasnn.comm.codec import Content
from megasnn.comm.group import Group
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.p2p import Receiver, Sender, WireOptions
from megasnn.schedule import Action, Kind

Link = tuple[int, Kind]  # (peer's pipeline rank, kind of this rank's actions on it)


class Transfers:
    """A link is what the validator takes for one: all tensors of one direction of the schedule, forward or backward,
    from one rank to another, first in, first out.

    No group carries tensors both ways between the same two ranks: where a transport works off what two ranks have
    with each other in one queue (NCCL), receives that both have posted ahead would block each other's sends.

    Args:
        placement: the pipeline rank of every chunk.
    """

    def __init__(self, placement: Sequence[int], state: ParallelState, options: WireOptions) -> None:
        self._placement, self._state, self._options = placement, state, options
        self._senders: dict[Link, Sender] = {}
        self._receivers: dict[Link, Receiver] = {}
        self._upcoming: dict[Link, deque[Action]] = {}
        self._sizes: Sequence[int] = ()

    def begin(self, actions: Sequence[Action], sizes: Sequence[int]) -> None:
        """Before a step: posts the first receive of each link, so that data can arrive while this rank computes.

        Args:
            actions: all that this rank will do. sizes: samples of each micro-batch.
        """
        self._sizes, self._upcoming = sizes, {}
        for action in actions:
            if action.kind.is_receive:
                self._upcoming.setdefault(self._link(action), deque()).append(action)
        for link in self._upcoming:
            if link not in self._receivers:
                peer, kind = link
                group = self._group(kind is Kind.RECV_FORWARD, upward=peer < self._state.pipeline.rank)
                self._receivers[link] = Receiver(group.ranks[peer], group, self._state.device)
            self._post_next(link)

    def send(self, action: Action, tensor: Tensor, content: Content) -> None:
        """Does not wait for the peer. Raises ValueError as `Sender.send` does."""
        link = peer, kind = self._link(action)
        if link not in self._senders:
            forward = kind is Kind.SEND_FORWARD
            group = self._group(forward, upward=peer > self._state.pipeline.rank)
            direction = "forward" if forward else "backward"
            self._senders[link] = Sender(group.ranks[peer], group, direction, self._state.device, self._options)
        self._senders[link].send(self._key(action), tensor, content)

    def receive(self, action: Action) -> Tensor:
        """Waits for the tensor, and posts the next receive on its link."""
        link = self._link(action)
        tensor = self._receivers[link].receive(self._key(action))
        self._post_next(link)
        return tensor

    def wait(self) -> None:
        """Until everything sent has left."""
        for sender in self._senders.values():
            sender.wait()

    def _post_next(self, link: Link) -> None:
        if self._upcoming[link]:
            self._receivers[link].post(self._key(self._upcoming[link].popleft()))

    def _link(self, action: Action) -> Link:
        return self._placement[action.peer.chunk], action.kind

    def _group(self, forward: bool, upward: bool) -> Group:
        """Most activations go up to a higher rank, and their gradients down."""
        state = self._state
        if forward:
            return state.pipeline if upward else state.pipeline_down
        return state.backward_up if upward else state.backward

    def _key(self, action: Action) -> tuple[int, int]:
        """Tensors of one boundary and one number of samples have the same shape: one descriptor serves them all."""
        assert action.micro_batch is not None
        return min(action.chunk, action.peer.chunk), self._sizes[action.micro_batch]
