"""Weight gradients as backward's second part, and the cache of cast weights.

A task adds to `parameter.grad`, a view of a gradient bucket, without autograd.
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

AddGradient = Callable[[Tensor], None]
"""Adds a gradient to a tensor of the parameter's shape and type."""
QueueGradient = Callable[[AddGradient], None]
"""Queues a layer's weight gradient: adds it at once, or in the second part of a split backward."""
WeightGradientTask = Callable[[], None]


class WeightGradients:
    """Queue for a rank's weight gradients.

    Attributes:
        report: called with each parameter whose gradient grew.
        anchor: scalar that makes autograd call a layer's backward, although the parameter is not in the graph.
    """

    def __init__(self) -> None:
        self.report: Callable[[Tensor], None] = _ignore
        self.anchor = torch.zeros((), requires_grad=True)
        self._parameters: dict[int, Tensor] = {}  # by id: a tensor's hash is a call of Python
        self._deferred: deque[WeightGradientTask] | None = None
        self._collected: list[tuple[Tensor, AddGradient]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightGradients:
        # The copy of a layer uses the same queue.
        return self

    def report_to(self, listener: Callable[[Tensor], None]) -> None:
        """Autograd's hooks miss these additions. In a run the listener is `GradientBuckets.accumulated`."""
        self.report = listener

    def outside_autograd(self, parameter: Tensor) -> tuple[Tensor | None, QueueGradient | None]:
        """The anchor, which autograd sees for the parameter, and a function for the layer's backward.

        (None, None) for a frozen parameter. Autograd calls none of the parameter's hooks.
        """
        # CUDA graphs ask which parameters come this way: see `takes`.
        self._parameters[id(parameter)] = parameter
        if not parameter.requires_grad:
            return None, None
        return self.anchor, partial(self._queue, parameter)

    def takes(self, parameter: Tensor) -> bool:
        """Whether a layer called `outside_autograd` for the parameter; layers do in their first forward."""
        return id(parameter) in self._parameters

    def _queue(self, parameter: Tensor, add: AddGradient) -> None:
        if self._collected is not None:
            self._collected.append((parameter, add))
        else:
            self.run_or_defer(partial(self._add, parameter, add))

    def run_or_defer(self, task: WeightGradientTask) -> None:
        # The layer before needs the input gradient at once, only the optimizer the weight gradient.
        if self._deferred is None:
            task()
        else:
            # In backward's order, deferred or not: a parameter's sums have the same bits.
            self._deferred.append(task)

    @contextmanager
    def collecting(self) -> Iterator[list[tuple[Tensor, AddGradient]]]:
        """Collects (parameter, function that adds its gradient) inside, and adds nothing."""
        self._collected = []
        try:
            yield self._collected
        finally:
            self._collected = None

    @contextmanager
    def deferring(self) -> Iterator[deque[WeightGradientTask]]:
        """Defers tasks inside, and yields them in the order to run them."""
        self._deferred = deque()
        try:
            yield self._deferred
        finally:
            self._deferred = None

    def _add(self, parameter: Tensor, add: AddGradient) -> None:
        # Autograd records nothing: a backward runs without it, and so do deferred tasks.
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        add(parameter.grad)
        self.report(parameter)


def _ignore(parameter: Tensor) -> None:
    """Default listener of `WeightGradients`."""


def add_product(grad: Tensor, rows: Tensor, total: Tensor) -> None:
    """total += grad^T rows, in the type of `total`."""
    if grad.dtype == total.dtype:
        total.addmm_(grad.T, rows)
    else:
        total += grad.T @ rows


class CastWeights:
    """Weights in the products' type. Inside `caching` each is copied once, outside in every forward."""

    def __init__(self) -> None:
        self._is_caching = False
        # (weight, values) by the weight's id: a tensor's hash is a call of Python.
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._substitutes: dict[int, tuple[Tensor, Tensor]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> CastWeights:
        return self

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight in a type, without a gradient."""
        found = self._substitutes.get(id(weight))
        if found is None and self._is_caching:
            found = self._copies.get(id(weight))
        if found is not None:
            return found[1]
        # cuDNN would copy an image kernel to channels last in every call.
        is_image_kernel = on_gpu(weight) and weight.ndim == 4
        order = torch.channels_last if is_image_kernel else torch.preserve_format
        copy = weight.detach().to(dtype, memory_format=order)
        if self._is_caching and (copy.dtype, copy.stride()) != (weight.dtype, weight.stride()):
            self._copies[id(weight)] = weight, copy
        return copy

    @property
    def resident_bytes(self) -> int:
        """The copies' bytes."""
        return sum(copy.nbytes for _, copy in self._copies.values())

    def free(self) -> None:
        """Frees the copies; the next forward makes new ones."""
        self._copies = {}

    def substitute(self, weight: Tensor, values: Tensor) -> None:
        """Replaces a weight in products from now on, by values in their type."""
        self._substitutes[id(weight)] = weight, values

    @contextmanager
    def caching(self) -> Iterator[None]:
        """Surrounds a step's forwards and backwards: no weight changes."""
        if self._copies:
            with torch.no_grad():
                # Into the same memory: CUDA graphs need unchanged addresses. One operator fills all copies.
                weights, copies = zip(*self._copies.values(), strict=True)
                torch._foreach_copy_(copies, weights)
        self._is_caching = True
        try:
            yield
        finally:
            self._is_caching = False
