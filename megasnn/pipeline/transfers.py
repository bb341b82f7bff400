"""One rank's ends of all links of the pipeline, used action by action."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from megasnn.comm.codec import Content
from megasnn.comm.group import Group
from megasnn.models.description import Carried
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.p2p import Receiver, Sender, WireOptions
from megasnn.schedule import Action, Kind

Link = tuple[int, Kind]  # (peer's pipeline rank, kind of this rank's actions on it)


class Transfers:
    """A link is what the validator takes for one: all tensors of one direction of the schedule, forward or backward,
    from one rank to another, first in, first out. The tensors of one boundary follow each other.

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
        self._gradients: dict[int, int] = {}  # by boundary, how many gradients come back over it, once it is known
        self._sizes: Sequence[int] = ()
        self._unfit: set[str] = set()  # what did not fit its format so far

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

    def send(self, action: Action, tensors: Sequence[Tensor], carried: Sequence[Carried] = ()) -> None:
        """Does not wait for the peer. Raises ValueError as `Sender.send` does, and names the tensor.

        Args:
            carried: what the tensors of a forward are; gradients are dense.
        """
        link = peer, kind = self._link(action)
        if link not in self._senders:
            forward = kind is Kind.SEND_FORWARD
            group = self._group(forward, upward=peer > self._state.pipeline.rank)
            direction = "forward" if forward else "backward"
            self._senders[link] = Sender(group.ranks[peer], group, direction, self._state.device, self._options)
        for index, tensor in enumerate(tensors):
            content = carried[index].content if carried else Content.DENSE
            try:
                if not self._senders[link].send(self._key(action, index), tensor, content):
                    self._warn_once(carried[index])
            except ValueError as error:
                raise ValueError(f"{error}: {carried[index].name if carried else f'gradient {index}'}") from error

    def _warn_once(self, unfit: Carried) -> None:
        if unfit.name not in self._unfit:
            self._unfit.add(unfit.name)
            sys.stderr.write(
                f"WARNING: {unfit.name} was said to hold {unfit.content.value}, has other values, and travels dense "
                "where it has; a neuron of one's own says so by SpikingNeuron(..., largest=None), a layer by holds=\n"
            )

    def receive(self, action: Action, count: int) -> list[Tensor]:
        """Waits for so many tensors, and posts the next receive on their link."""
        link = self._link(action)
        receiver = self._receivers[link]
        self._upcoming[link].popleft()
        if action.kind is Kind.RECV_BACKWARD:
            self._gradients[self._boundary(action)] = count
        tensors = []
        for index in range(count):
            key = self._key(action, index)
            if not receiver.is_posted:
                receiver.post(key)
            tensors.append(receiver.receive(key))
        self._post_next(link)
        return tensors

    def wait(self) -> None:
        """Until everything sent has left."""
        for sender in self._senders.values():
            sender.wait()

    def _post_next(self, link: Link) -> None:
        """Of the next action its first tensor, where it is known that there is one: before the first step, nobody knows
        whether a gradient comes back over a boundary."""
        if self._upcoming[link]:
            action = self._upcoming[link][0]
            if action.kind is Kind.RECV_FORWARD or self._gradients.get(self._boundary(action), 0):
                self._receivers[link].post(self._key(action, 0))

    def _link(self, action: Action) -> Link:
        return self._placement[action.peer.chunk], action.kind

    def _group(self, forward: bool, upward: bool) -> Group:
        """Most activations go up to a higher rank, and their gradients down."""
        state = self._state
        if forward:
            return state.pipeline if upward else state.pipeline_down
        return state.backward_up if upward else state.backward

    def _boundary(self, action: Action) -> int:
        return min(action.chunk, action.peer.chunk)

    def _key(self, action: Action, index: int) -> tuple[int, int, int, bool]:
        """Tensors of one place at one boundary and one number of samples have the same shape: one descriptor serves
        them all. It says whether they need a gradient, which differs in training and evaluation."""
        assert action.micro_batch is not None
        return self._boundary(action), index, self._sizes[action.micro_batch], torch.is_grad_enabled()
