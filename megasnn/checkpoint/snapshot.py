"""Tensors as they were at one moment, in memory of the CPU, so that training can go on while they are written."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from megasnn.sharding import ShardedTensor

COPYING_THREADS = min(4, os.cpu_count() or 1)


class Snapshot:
    """Copies of tensors as they are at one moment, for saving them later.

    The memory is kept from one time to the next: new memory costs several times as much as the copy itself.
    """

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}
        self._preparation: threading.Thread | None = None

    def prepare(self, entries: Sequence[ShardedTensor]) -> None:
        """Gets the memory that these tensors will need, in the background."""
        self._preparation = threading.Thread(target=self._touch, args=(entries,), name="megasnn-snapshot", daemon=True)
        self._preparation.start()

    def _touch(self, entries: Iterable[ShardedTensor]) -> None:
        for entry in entries:
            self._memory_for(entry).zero_()  # the system gives memory when it is first written to

    def take(self, entries: Iterable[ShardedTensor]) -> list[ShardedTensor]:
        """The same tensors with their present values. The copies are valid until the next time."""
        if self._preparation is not None:
            self._preparation.join()
            self._preparation = None
        pairs = [(entry, self._memory_for(entry)) for entry in entries]
        # One core alone does not use the bandwidth of the memory.
        with ThreadPoolExecutor(COPYING_THREADS) as threads:
            list(threads.map(_copy, pairs))
        for device in {entry.tensor.device for entry, _ in pairs if entry.tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return [ShardedTensor(entry.name, memory, entry.shard, entry.is_parameter) for entry, memory in pairs]

    def _memory_for(self, entry: ShardedTensor) -> Tensor:
        there = self._memory.get(entry.name)
        like = entry.tensor.detach()
        if there is None or there.shape != like.shape or there.dtype != like.dtype:
            there = torch.empty_like(like, device="cpu", pin_memory=like.is_cuda)
            self._memory[entry.name] = there
        return there


def _copy(pair: tuple[ShardedTensor, Tensor]) -> None:
    entry, memory = pair
    with torch.no_grad():
        memory.copy_(entry.tensor.detach(), non_blocking=True)
