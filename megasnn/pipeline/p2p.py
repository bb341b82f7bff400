"""Tensors from one pipeline rank to another: any shape, packed where their content allows it.

Both ends know a tensor's shape, memory order, type and format from the plan (megasnn/pipeline/boundaries.py), so that
every receive can be posted, and no host waits for another one. Only what plain modules give has an order that is not
known before it is computed: there, a descriptor travels before the first tensor of its kind, from host to host, and no
device is asked for it. Boundaries differ only by the number of samples, which both ends know, so that later tensors of
the same key need none. The memory order is restored as it was: a convolution may sum in another order on another memory
format, and the pipeline must not change a bit.

A message has the size that was planned, whatever the values: a packed one that cannot hold them is noted by its sender
(megasnn/device_checks.py), and whoever reads that with the loss does the step again. No host looks at what travels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.kernels.spike_codec import Content, bits_of, decode_into, empty_values, encode, encoded_like
from megasnn.parallel.traffic import statistics
from megasnn.parallel_state import Group
from megasnn.pinned import without_waiting

MAX_DIMS = 8
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.int32,
    torch.bool,
)
CONTENTS = tuple(Content)


@dataclass(frozen=True)
class WireOptions:
    """How tensors travel between stages.

    Attributes:
        gradient_dtype: in which type gradients travel; None: in their own. A narrower one rounds them.
    """

    gradient_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class TensorDescriptor:
    """Shape, memory order (dimensions from slowest to fastest), type and format of a tensor in transit.

    `sent_as` is the type of dense values on the way; `learns` says whether a gradient is to come back.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    content: Content
    sent_as: torch.dtype
    learns: bool = False

    @classmethod
    def of(cls, tensor: Tensor, content: Content, sent_as: torch.dtype | None = None) -> TensorDescriptor:
        # Dimensions of size 1 come first: their strides mean nothing and differ from one operation to the next.
        strides = tensor.stride()
        order = sorted(range(tensor.ndim), key=lambda dim: (tensor.shape[dim] > 1, -strides[dim]))
        dtype = tensor.dtype
        return cls(tuple(tensor.shape), tuple(order), dtype, content, sent_as or dtype, tensor.requires_grad)

    @property
    def count(self) -> int:
        return torch.Size(self.shape).numel()

    def flatten(self, tensor: Tensor) -> Tensor:
        """The values in memory order, as a 1-d tensor."""
        return tensor.permute(self.order).reshape(-1)

    def restore(self, payload: Tensor) -> Tensor:
        """The tensor with its shape and memory order, from a packed or dense message."""
        if self.content is Content.DENSE:
            values = payload.to(self.dtype)
        else:
            values = empty_values(self.count, self.dtype, payload.device)
            rows = values.view(-1, 1) if self.content is Content.COUNTS else values.view(1, -1)
            decode_into(payload, self.content, rows)
        sizes = [self.shape[dim] for dim in self.order]
        tensor = values.view(sizes).permute([self.order.index(dim) for dim in range(len(sizes))])
        return tensor.requires_grad_(self.learns)

    def differences(self, other: TensorDescriptor) -> str:
        """What is not the same in the two, with both values, for a message."""
        words = {"order": "memory order", "dtype": "type", "learns": "need of a gradient"}
        return ", ".join(
            f"its {words.get(each.name, each.name)} from {getattr(self, each.name)} to {getattr(other, each.name)}"
            for each in fields(self)
            if getattr(self, each.name) != getattr(other, each.name)
        )

    def buffer(self, device: torch.device, pinned: bool = False) -> Tensor:
        """Room for a message: packed or dense values."""
        return encoded_like(self.count, self.content, self.sent_as, device, pinned)

    def to_header(self) -> Tensor:
        """The header is on the CPU. Raises ValueError for a tensor that a header cannot describe."""
        if len(self.shape) > MAX_DIMS or self.dtype not in DTYPES:
            raise ValueError(
                f"a tensor of {len(self.shape)} dimensions and type {self.dtype} cannot cross pipeline stages: at most "
                f"{MAX_DIMS} dimensions of {', '.join(map(str, DTYPES))}"
            )
        fill = [0] * (MAX_DIMS - len(self.shape))
        types = [DTYPES.index(self.dtype), CONTENTS.index(self.content), DTYPES.index(self.sent_as)]
        values = [len(self.shape), *types, self.learns, *self.shape, *fill, *self.order, *fill]
        return torch.tensor(values, dtype=torch.int64)

    @classmethod
    def from_header(cls, header: Tensor) -> TensorDescriptor:
        dims, dtype, content, sent_as, learns, *rest = header.tolist()
        shape, order = rest[:dims], rest[MAX_DIMS : MAX_DIMS + dims]
        return cls(tuple(shape), tuple(order), DTYPES[dtype], CONTENTS[content], DTYPES[sent_as], bool(learns))


HEADER_LENGTH = 5 + 2 * MAX_DIMS
TRAFFIC = {"forward": "pipeline", "backward": "backward"}  # under which names traffic is counted


def message_of(tensor: Tensor, descriptor: TensorDescriptor) -> Tensor:
    """What is sent for a tensor: its values in the order of the descriptor, packed as that says. Spikes that know their
    bits in this order are not looked at.

    Raises ValueError for values that a packed message cannot hold; inside of a step they are noted, and what is sent
    then has the same size, and is of no use.
    """
    bits = bits_of(tensor) if descriptor.content is Content.SPIKES else None
    if bits is not None and tensor.permute(descriptor.order).is_contiguous():
        return bits
    flat = descriptor.flatten(tensor.detach())
    if descriptor.content is Content.DENSE:
        return flat.to(descriptor.sent_as)
    return encode(flat, descriptor.content, check=True)


def on_wire(message: Tensor, wire: torch.device) -> Tensor:
    """The message where it is sent from: itself, or of a GPU's a copy in pinned memory. The host waits for that."""
    if message.device.type == wire.type:
        return message
    return torch.empty_like(message, device=wire, pin_memory=message.is_cuda).copy_(message)


class Sender:
    """The sending end of one link, to one peer. Sends do not wait for the peer.

    Args:
        wire: where messages lie when they are sent.
    """

    def __init__(
        self,
        peer: int,
        group: Group,
        wire: torch.device,
        options: WireOptions = WireOptions(),  # noqa: B008  (frozen)
    ) -> None:
        self._peer, self._group, self._wire, self._options = peer, group, wire, options
        self._known: dict[Hashable, TensorDescriptor] = {}
        self._in_flight: deque[tuple[int, dist.Work, Tensor]] = deque()  # with the number of the transfer
        self._transfers = 0

    def begin(self) -> None:
        """Before the tensors of each transfer of a step."""
        self._transfers += 1

    def send(self, key: Hashable, tensor: Tensor, expected: TensorDescriptor | Content, direction: str) -> None:
        """Starts sending.

        Args:
            expected: the tensor as it is planned on both ends, in the memory order that it travels in; or its format
                alone, and the receiver is told the rest.
            direction: "forward", or of a gradient "backward".
        Raises:
            ValueError: before anything is sent, for a tensor that is not as it was planned, or changed its shape, order
                or type under its key, one that a descriptor cannot describe, and outside of a step, one whose values do
                not fit.
        """
        planned = expected if isinstance(expected, TensorDescriptor) else None
        content = expected if isinstance(expected, Content) else expected.content
        sent_as = self._options.gradient_dtype if direction == "backward" else None
        descriptor = TensorDescriptor.of(tensor, content, sent_as)
        if planned is not None:
            descriptor = replace(descriptor, order=planned.order)
        known = planned or self._known.get(key, descriptor)
        if known != descriptor:
            raise ValueError(
                f"a tensor between stages changed {known.differences(descriptor)}; micro-batches of as many samples "
                "are to give the same: let the layer return one shape, type and memory order (`.contiguous()` makes it "
                "one), and need a gradient always or never"
                if planned is None
                else f"a tensor between stages is not what the dry run of its layer has shown; it changed "
                f"{planned.differences(descriptor)}: let the layer give shapes and types that follow from those of its "
                "inputs alone"
            )
        header = None if planned is not None or key in self._known else descriptor.to_header()
        message = message_of(tensor, descriptor)
        if header is not None:
            self._known[key] = descriptor
            self._start(header)
        statistics.record(TRAFFIC[direction], "send", direction, message.nbytes, tensor.nbytes)
        self._start(on_wire(message, self._wire))

    def _start(self, payload: Tensor) -> None:
        work = dist.isend(payload, self._peer, group=self._group.handle)
        assert work is not None
        # The transport reads the payload until it is done: it must stay alive that long.
        self._in_flight.append((self._transfers, work, payload))
        while self._in_flight and self._in_flight[0][1].is_completed():
            self._in_flight.popleft()

    def arrived(self, transfers: int) -> None:
        """Lets the first transfers of the step go, which the peer has received. Gloo does not tell by itself."""
        while self._in_flight and self._in_flight[0][0] <= transfers:
            self._in_flight.popleft()[1].wait()

    def wait(self) -> None:
        """At the end of a step: until everything sent has left."""
        while self._in_flight:
            self._in_flight.popleft()[1].wait()
        self._transfers = 0


class Receiver:
    """The receiving end of one link, from one peer. `post` announces the next tensors early, `receive` waits for one.

    Args:
        wire: where messages are received. device: where their tensors are to be.
    """

    def __init__(self, peer: int, group: Group, wire: torch.device, device: torch.device) -> None:
        self._peer, self._group, self._wire, self._device = peer, group, wire, device
        self._pins = device.type == "cuda" and wire.type == "cpu"
        self._known: dict[Hashable, TensorDescriptor] = {}
        self._posted: deque[tuple[Hashable, dist.Work, Tensor]] = deque()

    @property
    def is_posted(self) -> bool:
        """Whether a tensor is announced that was not received."""
        return bool(self._posted)

    def post(self, key: Hashable, planned: TensorDescriptor | None = None) -> None:
        """Does nothing for the first tensor of a kind that is not planned: its size is known when its descriptor is
        there.

        Args:
            planned: as it is sent, where that is known on both ends.
        """
        expected = planned or self._known.get(key)
        if expected is not None:
            buffer = expected.buffer(self._wire, self._pins)
            self._posted.append((key, self._start(buffer), buffer))

    def receive(
        self, key: Hashable, here: Callable[[], None] = lambda: None, planned: TensorDescriptor | None = None
    ) -> Tensor:
        """Waits for the tensor. Of a kind that is known, it is posted now where it was not before.

        Args:
            planned: see `post`.
            here: called when the message has come, before there is a tensor of it: what may go now goes before that
                takes memory.
        """
        if planned is None and key not in self._known:
            header = torch.empty(HEADER_LENGTH, dtype=torch.int64)
            self._start(header).wait()
            self._known[key] = TensorDescriptor.from_header(header)
        if not self._posted:
            self.post(key, planned)
        posted, work, buffer = self._posted.popleft()
        assert posted == key, f"receive {key} while {posted} is announced"
        work.wait()
        here()
        return (planned or self._known[key]).restore(without_waiting(buffer, self._device))

    def _start(self, buffer: Tensor) -> dist.Work:
        work = dist.irecv(buffer, self._peer, group=self._group.handle)
        assert work is not None
        return work
