"""Names of actions, layers and messages in the traces of torch.profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler


def named(name: object) -> AbstractContextManager[object]:
    """Names what runs inside, in a trace that is being taken; otherwise it costs nothing."""
    # torch.profiler, or `torch.autograd.profiler.emit_nvtx`, records this process
    return profiler.record_function(str(name)) if profiler._is_profiler_enabled else nullcontext()
