"""Transfers between pipeline ranks: spikes as bits, ternary ones as two, counts as bytes, all other tensors dense.

Both ends know every boundary tensor's shape, type, content and gradient from the dry run. So receives are posted
early, and no host waits for another. Channels are last on the wire, too (megasnn/kernels/layout.py), so a pipeline
changes no bit.

A link is first in, first out. `megasnn/schedule/receives.py` decides which receives are posted before which action.
A sender notes values that do not fit the packing (megasnn/common/checks.py); the note is read with the loss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.common.bundle import EntryKey, entries_of
from megasnn.common.checks import explained
from megasnn.kernels.layout import empty, is_channels_last
from megasnn.kernels.spike_codec import Content, bits_of, decode_into, encode, encoded_like
from megasnn.layers.context import BuildContext
from megasnn.layers.init import tensors_of
from megasnn.layers.row_context import WholeImages
from megasnn.models.description import DRY_SAMPLES, Built, Carried, ModelDescription
from megasnn.parallel.sharding import own_span
from megasnn.parallel.traffic import traffic
from megasnn.parallel_state import Group, ParallelState, start_messages
from megasnn.pipeline.chunk import PipelineChunk
from megasnn.schedule import Action, Kind, Schedule
from megasnn.schedule.actions import RECEIVES, SENDS
from megasnn.schedule.receives import known_arrivals, sent_by_then


@dataclass(frozen=True)
class TensorSpec:
    """A tensor between two stages.

    Attributes:
        content: packing: one bit, two bits, bytes, or dense values.
        learns: the receiver returns a gradient.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    content: Content = Content.DENSE
    learns: bool = False

    def buffer(self, device: torch.device) -> Tensor:
        return encoded_like(torch.Size(self.shape).numel(), self.content, self.dtype, device)

    def pack(self, tensor: Tensor) -> Tensor:
        """Returns packed spikes' bits as they are.

        Raises ValueError for values that do not fit; a step notes them instead.
        """
        if self.content.is_bits and is_channels_last(tensor):
            bits = bits_of(tensor, self.content)
            if bits is not None:
                return bits
        values = tensor.detach()
        if values.ndim > 3:
            # Channels are last in memory and on the wire, as between all layers.
            values = values.movedim(2, -1)
        flat = values.reshape(-1)
        return flat if self.content is Content.DENSE else encode(flat, self.content, check=True)

    def unpack(self, message: Tensor) -> Tensor:
        """Channels last in memory."""
        values = message
        if self.content is not Content.DENSE:
            values = empty((torch.Size(self.shape).numel(),), self.dtype, message.device)
            rows = (-1, 1) if self.content is Content.COUNTS else (1, -1)
            decode_into(message, self.content, values.view(rows))
        if len(self.shape) < 4:
            return values.view(self.shape).requires_grad_(self.learns)
        steps, samples, channels, *space = self.shape
        return values.view(steps, samples, *space, channels).movedim(-1, 2).requires_grad_(self.learns)


class Boundaries:
    """This rank's part of the tensors between stages. Both ends have the same part."""

    def __init__(self, description: ModelDescription, context: BuildContext, built: Sequence[Built]) -> None:
        self._context = context
        self._specs: dict[tuple[int, EntryKey], TensorSpec] = {}
        learns: dict[int, bool] = {}  # by number of the layer; -1, -2, ... are the inputs of the model
        by_rows: dict[int, bool] = {}  # images that context-parallel ranks divide by rows
        task = description.task
        self._length = 0 if context.token_group is None else task.tokens
        for number, name in task.input_names.items():
            spec = task.inputs[name]
            frames = spec.frames(spec.empty(DRY_SAMPLES, context.numerics.dtype))
            if number == -1:
                self._image_dims = frames.ndim
            learns[number] = False
            by_rows[number] = True
            self._add(number, None, TensorSpec(tuple(frames.shape), frames.dtype), True)
        learns[task.target_number] = False
        by_rows[task.target_number] = True
        for number, (layer, described) in enumerate(zip(built, description.layers, strict=True)):
            has_gradient = any(tensor.requires_grad for tensor in tensors_of(layer.module))
            learns[number] = has_gradient or any(learns[source] for source in described.inputs)
            joins_rows = any(isinstance(module, WholeImages) for module in layer.module.modules())
            by_rows[number] = not joins_rows and all(by_rows[source] for source in described.inputs)
            for key, entry in entries_of(layer.output).items():
                content = described.entries[key].content
                learning = learns[number] and entry.is_floating_point()
                self._add(number, key, TensorSpec(tuple(entry.shape), entry.dtype, content, learning), by_rows[number])

    def _add(self, number: int, key: EntryKey, spec: TensorSpec, by_rows: bool) -> None:
        """Adds this rank's part: a dry-run tensor has whole images or sequences."""
        rows = self._context.row_group
        tokens = self._context.token_group
        shape = spec.shape
        if tokens is not None:
            if len(shape) < 3 or shape[-1] != self._length:
                return
            shape = (*shape[:-1], len(own_span(self._length, tokens.sizes, tokens.rank)))
        if rows is not None and len(shape) >= 4:
            if not by_rows or len(shape) != self._image_dims:
                return
            shape = (*shape[:3], len(own_span(shape[3], rows.sizes, rows.rank)), *shape[4:])
        self._specs[number, key] = replace(spec, shape=shape)

    def spec(self, carried: Carried, samples: int) -> TensorSpec:
        """The tensor for `samples` samples. Raises ValueError for an unknown shape."""
        spec = self._specs.get((carried.layer, carried.key))
        if spec is None:
            raise ValueError(
                f"a stage cannot begin after {carried.name}, whose shape does not follow from the dry run: choose "
                "another --pipeline-model-parallel-layout"
            )
        return replace(spec, shape=(spec.shape[0], samples, *spec.shape[2:]))


def linked(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Distinct pairs that exchange messages, ascending."""
    return sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]})


class Link:
    """Messages to and from another rank.

    Args:
        peer: the other end's global rank.
    """

    def __init__(self, outward: Group, inward: Group, peer: int, device: torch.device) -> None:
        self.outward = outward
        self.inward = inward
        self.peer = peer
        self._device = device
        self._in_flight: deque[tuple[int, dist.Work, Tensor]] = deque()  # (number of the transfer, work, message)
        self._posted: deque[tuple[dist.Work, Tensor]] = deque()
        self.transfers = 0

    def send(self, message: Tensor) -> None:
        work = dist.isend(message, self.peer, group=self.outward.handle)
        assert work is not None
        # The transport reads the message until then, so it must stay alive.
        self._in_flight.append((self.transfers, work, message))
        while self._in_flight and self._in_flight[0][1].is_completed():
            self._in_flight.popleft()

    def free_received(self, transfers: int) -> None:
        """Frees the messages in the step's first transfers, which the peer has received."""
        # Gloo completes a send only when it is waited for.
        while self._in_flight and self._in_flight[0][0] <= transfers:
            self._in_flight.popleft()[1].wait()

    def post(self, spec: TensorSpec) -> None:
        """Posts the next message's receive."""
        # A new tensor each time: Gloo's receives do not raise version counters (findings/gloo_version_counter.sh).
        buffer = spec.buffer(self._device)
        work = dist.irecv(buffer, self.peer, group=self.inward.handle)
        assert work is not None
        self._posted.append((work, buffer))

    def receive(self, spec: TensorSpec, free_received: Callable[[], None]) -> Tensor:
        """Waits for the message posted first.

        Args:
            free_received: called before the tensor takes memory.
        """
        work, buffer = self._posted.popleft()
        work.wait()
        free_received()
        return spec.unpack(buffer)

    def finish(self) -> None:
        self.free_received(self.transfers)
        self.transfers = 0


Message = tuple[Link, dict[int, tuple[TensorSpec, str]]]
"""A transfer: its link, and its tensors with their names, by position in the boundary."""


class Transfers:
    """This rank's links, used action by action."""

    def __init__(
        self,
        segments: Mapping[int, PipelineChunk],
        placement: Sequence[int],
        state: ParallelState,
        boundaries: Boundaries,
    ) -> None:
        self.placement = tuple(placement)
        self.links: dict[int, Link] = {}
        self._segments = segments
        self._boundaries = boundaries
        self._rank = state.pp.rank
        # Each direction has its own process group: in one queue, a receive posted early would hold up the send that its
        # peer waits for.
        up = state.pp
        down = state.pp_down
        # All ranks start the pairs in one order, upward first: see megasnn/parallel_state.py.
        for low, high in linked(pairwise(placement)):
            start_messages(up, low, high, state.device)
            start_messages(down, high, low, state.device)
            if self._rank == low:
                self.links[high] = Link(up, down, up.ranks[high], state.device)
            elif self._rank == high:
                self.links[low] = Link(down, up, up.ranks[low], state.device)
        # Plan of the last step, which the next step reuses if schedule and sizes are the same.
        self._schedule: Schedule | None = None
        self._sizes: Sequence[int] = ()
        self._arrivals: dict[Action, int] = {}
        self._posts: dict[Action, list[Action]] = {}
        self._messages: dict[Action, Message] = {}

    def begin(self, schedule: Schedule, sizes: Sequence[int]) -> None:
        # Reading a large schedule takes a second.
        if schedule is not self._schedule:
            self._schedule = schedule
            self._arrivals = known_arrivals(schedule, self._rank)
            self._posts = sent_by_then(schedule, self._rank)
        elif sizes == self._sizes:
            return
        self._sizes = sizes
        self._messages = {}
        for action in schedule.actions[self._rank]:
            if action.kind in SENDS or action.kind in RECEIVES:
                self._messages[action] = self._message(action, sizes, schedule.forward_only)

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Raises ValueError with a tensor's name if shape, type or values differ from the dry run."""
        link, carried = self._messages[action]
        link.transfers += 1
        group = "pp" if action.kind is Kind.SEND_FORWARD else "backward"
        for tensor, (spec, name) in zip(tensors, carried.values(), strict=True):
            with explained(partial("{1}: {0}".format, name)):
                if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
                    raise ValueError(
                        f"a tensor between stages has shape {list(tensor.shape)} and type {tensor.dtype}, and in the "
                        f"dry run of its layer {list(spec.shape)} and {spec.dtype}: shapes and types must depend on "
                        "the shapes and types of the layer's inputs alone"
                    )
                message = spec.pack(tensor)
            traffic.record(group, "message", message.nbytes, tensor.nbytes)
            link.send(message)

    def announce(self, action: Action) -> None:
        """Posts receives for all messages certainly sent by then; before a receive, its own."""
        for receive in self._posts.get(action, ()):
            link, carried = self._messages[receive]
            for spec, _ in carried.values():
                link.post(spec)

    def receive(self, action: Action) -> dict[int, Tensor]:
        """Waits for a transfer's tensors, by position in the boundary."""
        self.announce(action)
        link, carried = self._messages[action]
        free_received = partial(link.free_received, self._arrivals[action])
        tensors: dict[int, Tensor] = {}
        for position, (spec, _) in carried.items():
            tensors[position] = link.receive(spec, free_received)
        free_received()
        return tensors

    def wait(self) -> None:
        for link in self.links.values():
            link.finish()

    def _message(self, action: Action, sizes: Sequence[int], forward_only: bool) -> Message:
        segment = self._segments[action.segment]
        forward = action.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
        # A forward is received at the start of a segment, a backward at its end.
        is_at_start = (action.kind in RECEIVES) == forward
        boundary = segment.receives if is_at_start else segment.hands_on
        carried: dict[int, tuple[TensorSpec, str]] = {}
        for position, each in enumerate(boundary):
            spec = self._boundaries.spec(each, sizes[action.key[1]])
            if forward:
                carried[position] = replace(spec, learns=spec.learns and not forward_only), each.name
            elif spec.learns:
                carried[position] = replace(spec, content=Content.DENSE, learns=False), f"gradient of {each.name}"
        return self.links[self.placement[action.peer.segment]], carried
