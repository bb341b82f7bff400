"""Tensors from one pipeline rank to another: any shape, packed where their content allows it.

The receiver learns a tensor's shape, memory order, type and wire format from a descriptor that travels before the first
tensor of its kind. Boundaries differ only by the number of samples, which both ends know, so that later tensors of the
same key need no descriptor. The memory order is restored as it was: a convolution may sum in another order on another
memory format, and the pipeline must not change a bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.comm.codec import Wire, decode_into, encode, encoded_like
from megasnn.comm.group import Group
from megasnn.comm.statistics import statistics

MAX_DIMS = 8
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
WIRES = tuple(Wire)


@dataclass(frozen=True)
class TensorDescriptor:
    """Shape, memory order (dimensions from slowest to fastest), type and wire format of a tensor in transit."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    wire: Wire

    @classmethod
    def of(cls, tensor: Tensor, wire: Wire) -> TensorDescriptor:
        strides = tensor.stride()
        order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
        return cls(tuple(tensor.shape), tuple(order), tensor.dtype, wire)

    def flatten(self, tensor: Tensor) -> Tensor:
        """The values in memory order, as a 1-d tensor."""
        return tensor.permute(self.order).reshape(-1)

    def restore(self, payload: Tensor) -> Tensor:
        """The tensor with its shape and memory order, from what came over the wire."""
        sizes = [self.shape[dim] for dim in self.order]
        if self.wire is Wire.DENSE:
            values = payload
        else:
            values = torch.empty(payload_count(self.shape), dtype=self.dtype, device=payload.device)
            decode_into(payload, self.wire, values.view(-1, 1) if self.wire is Wire.COUNTS else values.view(1, -1))
        return values.view(sizes).permute([self.order.index(dim) for dim in range(len(sizes))])

    def buffer(self, device: torch.device) -> Tensor:
        return encoded_like(payload_count(self.shape), self.wire, self.dtype, device)

    def to_header(self, device: torch.device) -> Tensor:
        """Raises ValueError for a tensor that a header cannot describe."""
        if len(self.shape) > MAX_DIMS or self.dtype not in DTYPES:
            raise ValueError(
                f"a tensor of {len(self.shape)} dimensions and type {self.dtype} cannot cross pipeline stages: at most "
                f"{MAX_DIMS} dimensions of {', '.join(map(str, DTYPES))}"
            )
        fill = [0] * (MAX_DIMS - len(self.shape))
        head = [len(self.shape), DTYPES.index(self.dtype), WIRES.index(self.wire)]
        return torch.tensor([*head, *self.shape, *fill, *self.order, *fill], dtype=torch.int64, device=device)

    @classmethod
    def from_header(cls, header: Tensor) -> TensorDescriptor:
        dims, dtype, wire, *rest = header.tolist()
        shape, order = rest[:dims], rest[MAX_DIMS : MAX_DIMS + dims]
        return cls(tuple(shape), tuple(order), DTYPES[dtype], WIRES[wire])


HEADER_LENGTH = 3 + 2 * MAX_DIMS


def payload_count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


class Sender:
    """The sending end of one link: a peer, a direction. Sends do not wait for the peer."""

    def __init__(self, peer: int, group: Group, direction: str, device: torch.device) -> None:
        self._peer, self._group, self._direction, self._device = peer, group, direction, device
        self._known: dict[Hashable, TensorDescriptor] = {}
        self._in_flight: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, key: Hashable, tensor: Tensor, wire: Wire) -> None:
        """Raises ValueError, before anything is sent, for values that the wire format cannot carry exactly, a tensor
        that changed its shape, order or type under its key, and one that a descriptor cannot describe."""
        descriptor = TensorDescriptor.of(tensor, wire)
        known = self._known.get(key, descriptor)
        if known != descriptor:
            raise ValueError(f"a boundary tensor changed from {known} to {descriptor}")
        header = None if key in self._known else descriptor.to_header(self._device)
        payload = encode(descriptor.flatten(tensor), wire, check=True)
        if header is not None:
            self._known[key] = descriptor
            self._start(header)
        statistics.record(self._group.name, "send", self._direction, payload.nbytes, tensor.nbytes)
        self._start(payload)

    def _start(self, payload: Tensor) -> None:
        work = dist.isend(payload, self._peer, group=self._group.handle)
        assert work is not None
        # The transport reads the payload until it is done: it must stay alive that long.
        self._in_flight.append((work, payload))
        while self._in_flight and self._in_flight[0][0].is_completed():
            self._in_flight.popleft()

    def wait(self) -> None:
        """Until everything sent has left."""
        while self._in_flight:
            self._in_flight.popleft()[0].wait()


class Receiver:
    """The receiving end of one link. `post` announces the next tensor early; `receive` waits for the oldest one."""

    def __init__(self, peer: int, group: Group, device: torch.device) -> None:
        self._peer, self._group, self._device = peer, group, device
        self._known: dict[Hashable, TensorDescriptor] = {}
        self._posted: deque[tuple[Hashable, dist.Work, Tensor]] = deque()

    def post(self, key: Hashable) -> None:
        known = self._known.get(key)
        header = torch.empty(HEADER_LENGTH, dtype=torch.int64, device=self._device)
        buffer = header if known is None else known.buffer(self._device)
        self._posted.append((key, self._start(buffer), buffer))

    def receive(self, key: Hashable) -> Tensor:
        posted, work, buffer = self._posted.popleft()
        assert posted == key, f"receive {key} while {posted} was posted: transfers on a link are first in, first out"
        work.wait()
        if key not in self._known:
            self._known[key] = TensorDescriptor.from_header(buffer)
            buffer = self._known[key].buffer(self._device)
            self._start(buffer).wait()
        return self._known[key].restore(buffer)

    def _start(self, buffer: Tensor) -> dist.Work:
        work = dist.irecv(buffer, self._peer, group=self._group.handle)
        assert work is not None
        return work
