"""Tensors from one pipeline rank to another: spikes as bits, counts as bytes, all else dense.

Both ends know shape, type, content and need of a gradient of what a boundary carries: they follow from the model's dry
run. In memory the channels are last, on the wire as everywhere between layers (megasnn/layers/shape_inference.py), so a
pipeline changes no bit. So every receive can be posted, and no host waits for another one.

A link is all that one rank sends to another, forward and backward, first in, first out. Each direction between two
ranks has a process group of its own: with both in one queue, a receive that is posted early would hold up the send that
its peer waits for. `megasnn/schedule/receives.py` decides which receives are posted before which action.

A message has the size that was planned, whatever the values: a packed one that cannot hold them is noted by its sender
(megasnn/common/checks.py) and read with the loss. No host looks at what travels.
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
from megasnn.kernels.layout import empty
from megasnn.kernels.spike_codec import Content, bits_of, decode_into, encode, encoded_like
from megasnn.layers.context import BuildContext
from megasnn.layers.init import tensors_of
from megasnn.layers.row_context import WholeImages, row_group
from megasnn.layers.shape_inference import is_channels_last
from megasnn.models.description import DRY_SAMPLES, Built, Carried, ModelDescription
from megasnn.parallel.collectives import traffic
from megasnn.parallel.sharding import own_span
from megasnn.parallel_state import Group, ParallelState, start_messages
from megasnn.pipeline.chunk import PipelineChunk
from megasnn.schedule import Action, Kind, Schedule
from megasnn.schedule.actions import RECEIVES, SENDS
from megasnn.schedule.receives import known_arrivals, sent_by_then


@dataclass(frozen=True)
class TensorSpec:
    """Tensor in transit.

    Attributes:
        content: decides the format.
        learns: True if a gradient comes back.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    content: Content = Content.DENSE
    learns: bool = False

    def buffer(self, device: torch.device) -> Tensor:
        """Empty message."""
        return encoded_like(torch.Size(self.shape).numel(), self.content, self.dtype, device)

    def pack(self, tensor: Tensor) -> Tensor:
        """Makes the message. Spikes that know their bits are not looked at.

        Raises ValueError for values that do not fit; inside of a step they are noted, and the message is of no use.
        """
        bits = bits_of(tensor) if self.content is Content.SPIKES else None
        if bits is not None and is_channels_last(tensor):
            return bits
        flat = (tensor.detach().movedim(2, -1) if tensor.ndim > 3 else tensor.detach()).reshape(-1)
        return flat if self.content is Content.DENSE else encode(flat, self.content, check=True)

    def unpack(self, message: Tensor) -> Tensor:
        """Makes the tensor, its channels last in memory."""
        values = message
        if self.content is not Content.DENSE:
            values = empty((torch.Size(self.shape).numel(),), self.dtype, message.device)
            decode_into(message, self.content, values.view((-1, 1) if self.content is Content.COUNTS else (1, -1)))
        if len(self.shape) < 4:
            return values.view(self.shape).requires_grad_(self.learns)
        steps, samples, channels, *space = self.shape
        return values.view(steps, samples, *space, channels).movedim(-1, 2).requires_grad_(self.learns)


class Boundaries:
    """Tensors that boundaries between stages carry, on this rank; a boundary is between ranks with the same part of it.

    Args:
        context: what this rank's layers were built with. built: these, with outputs of a dry run.
    """

    def __init__(self, description: ModelDescription, context: BuildContext, built: Sequence[Built]) -> None:
        self._context = context
        inputs = [each.frames(each.empty(DRY_SAMPLES, context.dtype)) for each in description.task.inputs.values()]
        self._image_dims = inputs[0].ndim
        self._specs: dict[tuple[int, EntryKey], TensorSpec] = {}
        learns, by_rows = dict[int, bool](), dict[int, bool]()
        for number, frames in enumerate(inputs):
            learns[-1 - number], by_rows[-1 - number] = False, True
            self._add(-1 - number, None, TensorSpec(tuple(frames.shape), frames.dtype), True)
        for number, (layer, described) in enumerate(zip(built, description.layers, strict=True)):
            takes, parameters = described.inputs, tensors_of(layer.module)
            learns[number] = any(x.requires_grad for x in parameters) or any(learns[n] for n in takes)
            joins = any(isinstance(each, WholeImages) for each in layer.module.modules())
            by_rows[number] = not joins and all(by_rows[n] for n in takes)
            for key, entry in entries_of(layer.output).items():
                content = described.entries[key].content
                learning = learns[number] and entry.is_floating_point()
                self._add(number, key, TensorSpec(tuple(entry.shape), entry.dtype, content, learning), by_rows[number])

    def _add(self, number: int, key: EntryKey, spec: TensorSpec, by_rows: bool) -> None:
        """Notes this rank's part, where ranks share the rows of images, which a dry run sees whole."""
        rows, shape = row_group(self._context), spec.shape
        if rows is not None and len(shape) >= 4:
            if not by_rows or len(shape) != self._image_dims:
                return
            shape = (*shape[:3], len(own_span(shape[3], rows.sizes, rows.rank)), *shape[4:])
        self._specs[number, key] = replace(spec, shape=shape)

    def spec(self, carried: Carried, samples: int) -> TensorSpec:
        """Tensor of a micro-batch of so many samples. Raises ValueError where its shape is not known."""
        spec = self._specs.get((carried.layer, carried.key))
        if spec is None:
            raise ValueError(
                f"a stage cannot begin behind {carried.name}, whose shape does not follow from the dry run: choose "
                "another --pipeline-model-parallel-layout"
            )
        return replace(spec, shape=(spec.shape[0], samples, *spec.shape[2:]))


def linked(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Pairs of pipeline ranks that send to each other, each once, in ascending order."""
    return sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]})


class Link:
    """Both directions between this rank and another one.

    Args:
        outward, inward: groups that this rank sends through, and receives through.
        peer: global rank.
    """

    def __init__(self, outward: Group, inward: Group, peer: int, device: torch.device) -> None:
        self.outward, self.inward, self.peer = outward, inward, peer
        self._device = device
        self._in_flight: deque[tuple[int, dist.Work, Tensor]] = deque()  # with the number of the transfer
        self._posted: deque[tuple[dist.Work, Tensor]] = deque()
        self.transfers = 0

    def send(self, message: Tensor) -> None:
        """Starts sending. Does not wait for the peer."""
        work = dist.isend(message, self.peer, group=self.outward.handle)
        assert work is not None
        # The transport reads the message until it is done: it must stay alive that long.
        self._in_flight.append((self.transfers, work, message))
        while self._in_flight and self._in_flight[0][1].is_completed():
            self._in_flight.popleft()

    def arrived(self, transfers: int) -> None:
        """Lets go of the step's first transfers, which the peer has received. Gloo does not tell by itself."""
        while self._in_flight and self._in_flight[0][0] <= transfers:
            self._in_flight.popleft()[1].wait()

    def post(self, spec: TensorSpec) -> None:
        """Announces the next message."""
        buffer = spec.buffer(self._device)
        work = dist.irecv(buffer, self.peer, group=self.inward.handle)
        assert work is not None
        self._posted.append((work, buffer))

    def receive(self, spec: TensorSpec, let_go: Callable[[], None]) -> Tensor:
        """Waits for the first message that was announced. Args: let_go: called before its tensor takes memory."""
        work, buffer = self._posted.popleft()
        work.wait()
        let_go()
        return spec.unpack(buffer)

    def finish(self) -> None:
        """Waits at the end of a step until everything sent has left."""
        self.arrived(self.transfers)
        self.transfers = 0


Message = tuple[Link, dict[int, tuple[TensorSpec, str]]]
"""Tensors of a transfer with their names, by their places among those that the boundary carries."""


class Transfers:
    """One rank's links, used action by action.

    Args:
        segments: this rank's segments by index. placement: pipeline rank of every segment.
        boundaries: what they carry.
    """

    def __init__(
        self,
        segments: Mapping[int, PipelineChunk],
        placement: Sequence[int],
        state: ParallelState,
        boundaries: Boundaries,
    ) -> None:
        self._segments, self.placement, self._boundaries = segments, tuple(placement), boundaries
        self._rank, self.links = state.pp.rank, dict[int, Link]()
        up, down, device = state.pp, state.pp_down, state.device
        for low, high in linked(pairwise(placement)):
            start_messages(up, low, high, device)
            start_messages(down, high, low, device)
            if self._rank in (low, high):
                ways, peer = ((up, down), high) if self._rank == low else ((down, up), low)
                self.links[peer] = Link(*ways, up.ranks[peer], device)
        self._sizes: Sequence[int] = ()
        self._schedule: Schedule | None = None  # the last one, for which the next three are made
        self._arrivals, self._posts = dict[Action, int](), dict[Action, list[Action]]()
        self._messages: dict[Action, Message] = {}

    def begin(self, schedule: Schedule, sizes: Sequence[int]) -> None:
        """Begins a step. Args: sizes: samples of each micro-batch."""
        if schedule is not self._schedule:  # large ones take a second to read
            self._schedule, self._arrivals = schedule, known_arrivals(schedule, self._rank)
            self._posts = sent_by_then(schedule, self._rank)
        elif sizes == self._sizes:
            return
        self._sizes = sizes
        transfers = [each for each in schedule.actions[self._rank] if each.kind in SENDS | RECEIVES]
        self._messages = {each: self._message(each, sizes, schedule.forward_only) for each in transfers}

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Does not wait for the peer.

        Raises ValueError, naming the tensor, for one that is not as it was planned, and for values that do not fit.
        """
        link, carried = self._messages[action]
        link.transfers += 1
        group = "pp" if action.kind is Kind.SEND_FORWARD else "backward"
        for tensor, (spec, name) in zip(tensors, carried.values(), strict=True):
            with explained(partial("{1}: {0}".format, name)):
                if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
                    raise ValueError(
                        f"a tensor between stages has shape {list(tensor.shape)} and type {tensor.dtype}, and by the "
                        f"dry run of its layer {list(spec.shape)} and {spec.dtype}: let the layer give shapes and "
                        "types that follow from those of its inputs alone"
                    )
                message = spec.pack(tensor)
            traffic.record(group, message.nbytes, tensor.nbytes)
            link.send(message)

    def announce(self, action: Action) -> None:
        """Posts what was sent for certain before this rank does what comes now, a receive itself at the latest."""
        for receive in self._posts.get(action, ()):
            link, carried = self._messages[receive]
            for spec, _ in carried.values():
                link.post(spec)

    def receive(self, action: Action) -> dict[int, Tensor]:
        """Waits for the tensors, which are given by their places among those that the boundary carries."""
        self.announce(action)
        link, carried = self._messages[action]
        let_go = partial(link.arrived, self._arrivals[action])
        tensors = {position: link.receive(spec, let_go) for position, (spec, _) in carried.items()}
        let_go()
        return tensors

    def wait(self) -> None:
        """Waits until everything sent has left."""
        for link in self.links.values():
            link.finish()

    def _message(self, action: Action, sizes: Sequence[int], forward_only: bool) -> Message:
        """Link and tensors of a transfer; of gradients, those of the tensors that learn."""
        segment, forward = self._segments[action.segment], action.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
        samples, carried = sizes[action.key[1]], dict[int, tuple[TensorSpec, str]]()
        for position, each in enumerate(segment.receives if action.kind.is_receive == forward else segment.hands_on):
            spec = self._boundaries.spec(each, samples)
            if forward:
                carried[position] = replace(spec, learns=spec.learns and not forward_only), each.name
            elif spec.learns:
                carried[position] = replace(spec, content=Content.DENSE, learns=False), f"gradient of {each.name}"
        return self.links[self.placement[action.peer.segment]], carried
