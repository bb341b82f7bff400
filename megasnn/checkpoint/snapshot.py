"""Tensors as they were at one moment, in memory of the CPU, so that training can go on while they are written."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures

import torch
from torch import Tensor

from megasnn.sharding import ShardedTensor

COPYING_THREADS = min(4, os.cpu_count() or 1)
_Pair = tuple[ShardedTensor, Tensor]


class Snapshot:
    """Copies of tensors as they are at one moment, for saving them later.

    Weights and the optimizer's state stay as they are until the next update, so one thread copies them beside the
    forward and backward passes before it. `settle` comes before the update; what is left by then, several threads copy:
    one core alone does not use the bandwidth of the memory.

    The memory is kept from one time to the next: new memory costs several times as much as the copy itself.
    """

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}
        self._preparation: threading.Thread | None = None
        self._left: deque[_Pair] = deque()
        self._threads = futures.ThreadPoolExecutor(COPYING_THREADS, "megasnn-snapshot")
        self._copying: list[futures.Future[None]] = []
        self._settling = threading.Lock()
        self._devices: set[torch.device] = set()

    def prepare(self, entries: Sequence[ShardedTensor]) -> None:
        """Gets the memory that these tensors will need, in the background."""
        self._preparation = threading.Thread(target=self._touch, args=(entries,), name="megasnn-snapshot", daemon=True)
        self._preparation.start()

    def _touch(self, entries: Iterable[ShardedTensor]) -> None:
        for entry in entries:
            self._memory_for(entry).zero_()  # the system gives memory when it is first written to

    def take(
        self, entries: Iterable[ShardedTensor], until_update: Callable[[ShardedTensor], bool]
    ) -> list[ShardedTensor]:
        """The same tensors with their present values, complete after `settle`; valid until the next time.

        Args:
            until_update: whether a tensor stays as it is until the next update; the others are copied at once.
        """
        if self._preparation is not None:
            self._preparation.join()
            self._preparation = None
        self.settle()
        pairs = [(entry, self._memory_for(entry)) for entry in entries]
        self._devices = {entry.tensor.device for entry, _ in pairs if entry.tensor.is_cuda}
        self._left = deque(pair for pair in pairs if not until_update(pair[0]))
        at_once = self._threads.submit(self._copy_left)
        futures.wait([at_once])
        self._left = deque(pair for pair in pairs if until_update(pair[0]))
        self._copying = [at_once, self._threads.submit(self._copy_left)]
        return [ShardedTensor(entry.name, memory, entry.shard, entry.is_parameter) for entry, memory in pairs]

    def settle(self) -> None:
        """Waits until everything is copied, or on a GPU in its queue; from here on tensors may be changed."""
        with self._settling:  # a second caller waits for the helpers of the first, too
            if self._left:
                self._copying += [self._threads.submit(self._copy_left) for _ in range(COPYING_THREADS - 1)]
            futures.wait(self._copying)

    def wait(self) -> None:
        """Waits until the copies can be read, and leaves cores to training meanwhile. Raises what copying raised."""
        for each in self._copying[:2]:
            each.result()
        with self._settling:
            for each in self._copying:
                each.result()
        for device in self._devices:
            torch.cuda.synchronize(device)

    def _copy_left(self) -> None:
        while self._left:
            try:
                pair = self._left.popleft()
            except IndexError:  # another thread was faster
                return
            _copy(pair)

    def _memory_for(self, entry: ShardedTensor) -> Tensor:
        there = self._memory.get(entry.name)
        like = entry.tensor.detach()
        if there is None or there.shape != like.shape or there.dtype != like.dtype:
            there = torch.empty_like(like, device="cpu", pin_memory=like.is_cuda)
            self._memory[entry.name] = there
        return there


def _copy(pair: _Pair) -> None:
    entry, memory = pair
    with torch.no_grad():
        memory.copy_(entry.tensor.detach(), non_blocking=True)
