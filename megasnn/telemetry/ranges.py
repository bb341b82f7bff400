"""Names for what runs, in the traces of torch.profiler and of NVIDIA's tools."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.autograd import profiler


def named(name: str) -> AbstractContextManager[object]:
    """What runs inside is a range of this name in a trace that is being taken; otherwise it costs nothing."""
    if not is_traced():
        return nullcontext()
    return _named_for_nvidia(name) if torch.cuda.is_available() else profiler.record_function(name)


def is_traced() -> bool:
    """Whether torch.profiler, or `torch.autograd.profiler.emit_nvtx`, records what this process does."""
    return profiler._is_profiler_enabled


@contextmanager
def _named_for_nvidia(name: str) -> Iterator[None]:
    with profiler.record_function(name):
        torch.cuda.nvtx.range_push(name)  # `range` would take braces in a name for something to fill in
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()
