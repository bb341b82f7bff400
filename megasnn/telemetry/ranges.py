"""Names of actions, layers and messages in the traces of torch.profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.autograd import profiler


def named(name: str) -> AbstractContextManager[object]:
    """Names what runs inside, in a trace that is being taken; otherwise it costs nothing."""
    return profiler.record_function(name) if is_traced() else nullcontext()


def is_traced() -> bool:
    """True while torch.profiler, or `torch.autograd.profiler.emit_nvtx`, records this process."""
    return profiler._is_profiler_enabled


class BackwardRanges:
    """Names each layer's part in the backward of a chunk.

    Autograd works off the layers one after another, since it takes what forward made last. So a range begins with the
    first work of a layer, and ends where that of another begins, or with the backward.
    """

    def __init__(self) -> None:
        self._layer: str | None = None
        self._open = ExitStack()

    def watch(self, layer: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Registers a layer after its forward, in a trace."""
        before = {x.grad_fn for x in inputs}  # which a layer may hand on
        for node in {y.grad_fn for y in outputs} - before:
            if node is not None:
                node.register_prehook(partial(self._begin, layer))

    @contextmanager
    def around(self) -> Iterator[None]:
        """Runs a backward, in a trace in the thread that asks for it, so that its ranges lie in one another."""
        if not is_traced():
            yield
            return
        try:
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            self._end()

    def later(self, task: Callable[[], None]) -> Callable[[], None]:
        """Names a weight gradient that a layer leaves for later."""
        return task if self._layer is None else partial(_run, f"{self._layer}: weight gradient", task)

    def _begin(self, layer: str, _: Sequence[Tensor]) -> None:
        if layer != self._layer:
            self._end()
            self._layer = layer
            self._open.enter_context(named(f"{layer}: input gradient"))

    def _end(self) -> None:
        self._layer = None
        self._open.close()


def _run(name: str, task: Callable[[], None]) -> None:
    with named(name):
        task()
