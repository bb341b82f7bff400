"""Names for what runs, in the traces of torch.profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.autograd import profiler


def named(name: str) -> AbstractContextManager[object]:
    """What runs inside is a range of this name in a trace that is being taken; otherwise it costs nothing."""
    if not is_traced():
        return nullcontext()
    return profiler.record_function(name)


def is_traced() -> bool:
    """Whether torch.profiler, or `torch.autograd.profiler.emit_nvtx`, records what this process does."""
    return profiler._is_profiler_enabled


class BackwardRanges:
    """Names for what layers do in the backward of a chunk.

    Autograd does the work of one layer after another, from the last one of forward to the first: of all that can be
    done it takes what forward made last. So a range begins with the first work of a layer, and ends where that of
    another begins, or with the backward.
    """

    def __init__(self) -> None:
        self._layer: str | None = None
        self._open = ExitStack()

    def watch(self, layer: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """After a layer's forward, in a trace: its part in the backward has its name."""
        before = {x.grad_fn for x in inputs}  # which a layer may hand on
        for node in {y.grad_fn for y in outputs} - before:
            if node is not None:
                node.register_prehook(partial(self._begin, layer))

    @contextmanager
    def around(self) -> Iterator[None]:
        """Around a backward. In a trace it runs in the thread that asks for it, as its ranges lie in one another."""
        if not is_traced():
            yield
            return
        try:
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            self._end()

    def later(self, task: Callable[[], None]) -> Callable[[], None]:
        """What a layer leaves in its part of the backward: a range of its own, whenever it runs."""
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
