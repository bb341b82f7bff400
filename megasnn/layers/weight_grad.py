"""Gradients of weights as the second part of backward, and the weights that are multiplied by.

Backward needs the gradient of a layer's input right away, for the layer before it; that of its weight has time until
the optimizer's step. Convolutions and linear layers therefore only leave a task for the latter, in `WeightGradients`.
A task adds straight to `parameter.grad`, which is a place in a gradient bucket; autograd takes no part in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megasnn.kernels.layout import on_gpu

AddGradient = Callable[[Tensor], None]  # adds to the tensor it is given, which is shaped and typed like the parameter
Leave = Callable[[AddGradient], None]
WeightGradientTask = Callable[[], None]


class WeightGradients:
    """Tasks that the layers of a rank's chunks leave for later.

    Whether a task runs at once or deferred, it is the same computation, and each parameter's tasks run in the order
    in which backward left them: the sums have the same bits.

    Attributes:
        report: called with each parameter whose gradient grew.
        anchor: stands for all parameters in autograd's graphs; it has no gradient.
    """

    def __init__(self) -> None:
        self.report: Callable[[Tensor], None] = _ignore
        self.anchor = torch.zeros((), requires_grad=True)
        self._parameters: set[Tensor] = set()
        self._deferred: deque[WeightGradientTask] | None = None
        self._collected: list[tuple[Tensor, AddGradient]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightGradients:
        return self  # the copy of a layer leaves its tasks where the layer does

    def report_to(self, listener: Callable[[Tensor], None]) -> None:
        """Calls a function with each parameter whose gradient grew. Autograd's hooks do not see these additions."""
        self.report = listener

    def of(self, parameter: Tensor) -> tuple[Tensor | None, Leave | None]:
        """Gives a parameter's layer the anchor, for autograd must not see the parameter, whose hooks it would call, and
        what the layer's backward calls; None for a frozen parameter."""
        self._parameters.add(parameter)
        return (self.anchor, partial(self._leave, parameter)) if parameter.requires_grad else (None, None)

    def takes(self, parameter: Tensor) -> bool:
        """Tells whether the layer of a parameter has asked for it; a layer that was never called has asked for none."""
        return parameter in self._parameters

    def _leave(self, parameter: Tensor, add: AddGradient) -> None:
        if self._collected is not None:
            self._collected.append((parameter, add))
        else:
            self.leave(partial(self._add, parameter, add))

    def leave(self, task: WeightGradientTask) -> None:
        """Runs a task now, or when deferred tasks are run."""
        task() if self._deferred is None else self._deferred.append(task)

    @contextmanager
    def collected(self) -> Iterator[list[tuple[Tensor, AddGradient]]]:
        """Adds nothing inside: the list gets each parameter, and what would add to its gradient."""
        self._collected = []
        try:
            yield self._collected
        finally:
            self._collected = None

    @contextmanager
    def deferred(self) -> Iterator[deque[WeightGradientTask]]:
        """Runs no tasks inside, but collects them, to be run in their order."""
        self._deferred = deque()
        try:
            yield self._deferred
        finally:
            self._deferred = None

    def _add(self, parameter: Tensor, add: AddGradient) -> None:
        with torch.no_grad():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            add(parameter.grad)
        self.report(parameter)


def _ignore(parameter: Tensor) -> None:
    """Listener of gradients that nothing waits for."""


class CastWeights:
    """Weights that convolutions and linear layers multiply by, cast where they compute in another type.

    Inside `caching` each weight is copied once; otherwise in every forward.

    Args:
        stay: whether the copies stay where they are from step to step, as graphs need it.
    """

    def __init__(self, stay: bool = False) -> None:
        self._stay, self._is_caching = stay, False
        self._copies: dict[Tensor, Tensor] = {}
        self._given: dict[Tensor, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> CastWeights:
        return self

    def of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight in that type, without gradient."""
        if weight in self._given:
            return self._given[weight]
        if self._is_caching and weight in self._copies:
            return self._copies[weight]
        is_image_kernel = on_gpu(weight) and weight.ndim == 4  # cuDNN would bring it into that order in each call
        order = torch.channels_last if is_image_kernel else torch.preserve_format
        copy = weight.detach().to(dtype, memory_format=order)
        if self._is_caching:
            self._copies[weight] = copy
        return copy

    @property
    def resident_bytes(self) -> int:
        """Bytes of the copies that there are; a weight that is computed with as it is has none."""
        copies = [copy for weight, copy in self._copies.items() if copy.data_ptr() != weight.data_ptr()]
        return sum(each.nbytes for each in copies)

    def give(self, weight: Tensor, values: Tensor) -> None:
        """Sets the values, of the type that is computed in, that are multiplied by from now on."""
        self._given[weight] = values

    @contextmanager
    def caching(self) -> Iterator[None]:
        """Keeps copies where no weight changes: around the forwards and backwards of a step."""
        if self._stay:
            self._refresh()
        self._is_caching = True
        try:
            yield
        finally:
            self._is_caching = False
            if not self._stay:
                self._copies = {}

    def _refresh(self) -> None:
        apart = {w: copy for w, copy in self._copies.items() if (w.dtype, w.stride()) != (copy.dtype, copy.stride())}
        if apart:
            with torch.no_grad():
                torch._foreach_copy_(list(apart.values()), list(apart))
