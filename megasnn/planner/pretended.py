"""Other ranks that are only pretended: a process group of one process, whose exchanges take the memory of real ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.parallel_state import ParallelState, destroy_model_parallel, initialize_model_parallel

NAME = "pretended"


class _Over:
    """An operation that has ended when it begins; as a real one it keeps its tensors while somebody has it."""

    def __init__(self, *tensors: object) -> None:
        self._tensors = tensors

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


_ProcessGroup: Any = dist.ProcessGroup  # an operation may be any object that waits; torch's types say its own


class _Pretended(_ProcessGroup):
    """Others send what this rank sends, where all send alike, and zeros otherwise. Sums are this rank's values."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._id = options.group_id

    @property
    def group_name(self) -> str:
        """What torch.distributed frees a group by; torch's own finds none for a group written in Python."""
        return self._id

    def allgather(self, into: list[list[Tensor]], mine: list[Tensor], *_: Any, **__: Any) -> _Over:
        for each in into[0]:
            each.copy_(mine[0])
        return _Over(into, mine)

    def allreduce(self, tensors: list[Tensor], *_: Any, **__: Any) -> _Over:
        return _Over(tensors)

    def alltoall_base(self, taken: Tensor, given: Tensor, *_: Any, **__: Any) -> _Over:
        taken.zero_()
        return _Over(taken, given)

    all_to_all_single = alltoall_base  # its name since torch 2.13

    def broadcast(self, *_: Any, **__: Any) -> _Over:
        return _Over()

    def barrier(self, *_: Any, **__: Any) -> _Over:
        return _Over()


@contextmanager
def pretended_ranks(tensor: int, context: int) -> Iterator[ParallelState]:
    """The state of the first of so many ranks that share layers and micro-batches. No process group may be there."""
    if tensor * context > 1:
        dist.Backend.register_backend(NAME, lambda options, _: _Pretended(options), extended_api=True, devices="cpu")
        dist.init_process_group(NAME, rank=0, world_size=tensor * context, store=dist.HashStore())
    try:
        yield initialize_model_parallel(tensor, device=torch.device("cpu"), context_parallel_size=context)
    finally:
        destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
