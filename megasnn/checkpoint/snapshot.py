"""Tensors as they were at one moment, in memory of the CPU, so that training can go on while they are written."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from math import prod

import torch
from torch import Tensor

from megasnn.checkpoint.piece_file import Span
from megasnn.checkpoint.torch_frame import torch_frame
from megasnn.checkpoint.writer_process import WriterProcess
from megasnn.sharded_tensors import ShardedTensor
from megasnn.sharding import Piece, Shard

COPYING_THREADS = min(4, os.cpu_count() or 1)
_ALIGNMENT = 64  # bytes
_Pair = tuple[ShardedTensor, list[tuple[Piece, Tensor]]]


class Image:
    """Memory in which the pieces of certain tensors lie as in a file, and the process that writes them from there.

    Attributes:
        kinds: names, shards and types of the tensors.
        writer: the process.
        spans: offset and length of each piece. Its values are aligned, as in no file.
    """

    def __init__(self, entries: Sequence[ShardedTensor]) -> None:
        self.kinds = _kinds(entries)
        pieces = [shard.pieces() for _, shard, _ in self.kinds]
        boxes = [(box.sizes, kind[-1]) for kind, each in zip(self.kinds, pieces, strict=True) for box in each]
        self._frames = [torch_frame(*box) for box in boxes]
        self.spans: list[Span] = []
        end = 0
        for (before, after), (shape, dtype) in zip(self._frames, boxes, strict=True):
            begin = end + -(end + len(before)) % _ALIGNMENT
            end = begin + len(before) + prod(shape) * dtype.itemsize + len(after)
            self.spans.append((begin, end - begin))
        self.writer = WriterProcess(end, next((entry.tensor.device for entry in entries if entry.tensor.is_cuda), None))
        values = iter(
            self.writer.memory[begin + len(before) : begin + length - len(after)].view(dtype).view(shape)
            for (before, after), (shape, dtype), (begin, length) in zip(self._frames, boxes, self.spans, strict=True)
        )
        self._values = [[(piece, next(values)) for piece in each] for each in pieces]
        self._fill()

    def fits(self, entries: Sequence[ShardedTensor]) -> bool:
        """Whether it is of these tensors, and can be written."""
        return self.writer.alive and self.kinds == _kinds(entries)

    def _fill(self) -> None:
        """Writes what stays as it is. The system gives memory when it is first written to, so all of it is."""
        self.writer.memory.zero_()
        memory = self.writer.memory.numpy().data
        for (before, after), (begin, length) in zip(self._frames, self.spans, strict=True):
            memory[begin : begin + len(before)] = before
            memory[begin + length - len(after) : begin + length] = after

    def pairs(self, entries: Sequence[ShardedTensor]) -> list[_Pair]:
        """Each tensor with its pieces and the memory of their values."""
        return list(zip(entries, self._values, strict=True))


class Snapshot:
    """Copies of tensors as they are at one moment, in the memory of a process that writes them.

    Weights and the optimizer's state stay as they are until the next update, so one thread copies them beside the
    forward and backward passes before it. `settle` comes before the update; what is left by then, several threads copy:
    one core alone does not use the bandwidth of the memory.

    Memory and process are kept from one time to the next: new memory costs several times as much as the copy itself.

    """

    def __init__(self) -> None:
        self._image: futures.Future[Image] | None = None
        self._left: deque[_Pair] = deque()
        self._threads = futures.ThreadPoolExecutor(COPYING_THREADS, "megasnn-snapshot")
        self._copying: list[futures.Future[None]] = []
        self._settling = threading.Lock()
        self._devices: set[torch.device] = set()

    @property
    def image(self) -> Image | None:
        """What the copies lie in; None before the first time. Raises what has prevented it."""
        return self._image.result() if self._image is not None else None

    def prepare(self, entries: Sequence[ShardedTensor]) -> futures.Future[Image]:
        """Gets the memory that these tensors will need, and starts the process, in the background."""
        if self._image is None or not _fits(self._image, entries):
            self.close()
            self._image = self._threads.submit(Image, entries)  # in a thread that lasts, as the process has to
        return self._image

    def take(self, entries: Sequence[ShardedTensor], until_update: Callable[[ShardedTensor], bool]) -> None:
        """Copies the tensors' present values; complete after `settle`, valid until the next time.

        Args:
            until_update: whether a tensor stays as it is until the next update; the others are copied at once.
        """
        self.settle()
        self._copying, image = [], self.prepare(entries)
        if image.exception() is not None:  # `wait` raises it
            return
        pairs = image.result().pairs(entries)
        self._devices = {entry.tensor.device for entry in entries if entry.tensor.is_cuda}
        self._left = deque(pair for pair in pairs if not until_update(pair[0]))
        at_once = self._threads.submit(self._copy_left)
        futures.wait([at_once])
        self._left = deque(pair for pair in pairs if until_update(pair[0]))
        self._copying = [at_once, self._threads.submit(self._copy_left)]

    def settle(self) -> None:
        """Waits until everything is copied, or on a GPU in its queue; from here on tensors may be changed."""
        with self._settling:  # a second caller waits for the helpers of the first, too
            if self._left:
                self._copying += [self._threads.submit(self._copy_left) for _ in range(COPYING_THREADS - 1)]
            futures.wait(self._copying)

    def wait(self) -> None:
        """Waits until the copies can be read, and leaves cores to training meanwhile. Raises what copying raised."""
        for each in (self._image, *self._copying[:2]):
            if each is not None:
                each.result()
        with self._settling:
            for each in self._copying:
                each.result()
        for device in self._devices:
            # Not the device, which waits for messages of others, too, and must not be waited for during a capture.
            torch.cuda.default_stream(device).synchronize()

    def close(self) -> None:
        """Ends the process and lets go of the memory."""
        if self._image is not None and self._image.exception() is None:
            self._image.result().writer.close()

    def _copy_left(self) -> None:
        while self._left:
            try:
                pair = self._left.popleft()
            except IndexError:  # another thread was faster
                return
            _copy(pair)


def _fits(image: futures.Future[Image], entries: Sequence[ShardedTensor]) -> bool:
    return image.exception() is None and image.result().fits(entries)


def _kinds(entries: Sequence[ShardedTensor]) -> list[tuple[str, Shard, torch.dtype]]:
    return [(entry.name, entry.shard, entry.tensor.dtype) for entry in entries]


def _copy(pair: _Pair) -> None:
    entry, pieces = pair
    local = entry.tensor.detach()
    for piece, memory in pieces:
        memory.copy_(piece.of_local(local), non_blocking=True)
