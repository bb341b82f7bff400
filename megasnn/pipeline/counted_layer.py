"""The memory that one layer needs for a micro-batch, counted allocation by allocation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megasnn.again import Findings, first_forward, second_forward
from megasnn.bundle import Bundle, entries_of, map_entries
from megasnn.comm.statistics import statistics
from megasnn.kernels.packed import bits_of, remember_bits
from megasnn.models.description import INPUT
from megasnn.pipeline.edges import backward_of
from megasnn.pipeline.measured_layer import MeasuredLayer
from megasnn.telemetry.allocations import AllocationCounter


@dataclass(frozen=True)
class LayerMemory:
    """What a layer keeps and needs for a micro-batch, in bytes, and what ranks that share it exchange; the fields are
    those of LayerCost."""

    held: int
    working: tuple[int, int, int]
    working_whole: int
    deferred: int
    output: int
    found: int
    working_again: int
    collectives: int
    exchanged: int


class CountedLayer:
    """A layer that runs for a few samples, so that its memory can be counted.

    Args:
        inputs: of the layer.
        samples: as a chunk is given them.
    Attributes:
        output: with its bits, where it knows them.
    """

    def __init__(self, layer: MeasuredLayer, inputs: Sequence[Bundle], samples: range, device: torch.device) -> None:
        self._layer, self._inputs, self._samples, self._device = layer, inputs, samples, device
        layer.forget()
        # What is left of this goes while something else is counted: torch warns of memory that it did not see taken.
        before = statistics.total()
        with AllocationCounter(device).counting(), statistics.counting():
            y = layer.output_of(inputs, samples)
            self._learning = [_without_values(each) for each in entries_of(y).values() if each.requires_grad]
            self._backward_of(y)()  # the first one pays for compiling and for the gradients' memory
            self._layer.taken_gradients()
            self.output = map_entries(_copied, y)
        after = statistics.total()
        self._traffic = after.calls - before.calls, after.bytes - before.bytes

    def memory(self, repeats: bool) -> LayerMemory:
        """What forward and backward take.

        Args:
            repeats: whether that of a forward that is computed again is wanted, too; otherwise it is 0.
        """
        self._layer.forget()
        held, forward, whole = self._whole_backward()
        inputs, deferred, weights = self._parts_of_backward()
        found, again = self._again() if repeats else (0, 0)
        output = sum(each.nbytes for each in entries_of(self.output).values())
        return LayerMemory(held, (forward, inputs, weights), whole, deferred, output, found, again, *self._traffic)

    def _whole_backward(self) -> tuple[int, int, int]:
        """What forward keeps and needs, and what the whole backward needs."""
        counter, forward, backward = self._forward()
        held = counter.held
        with counter.counting():
            backward()
        self._layer.taken_gradients()
        return held, forward, counter.peak - held - self._gradient

    def _parts_of_backward(self) -> tuple[int, int, int]:
        """What the first part needs and leaves, and what the second one needs."""
        counter, _, backward = self._forward()
        held = counter.held
        with counter.counting(), self._layer.deferred() as tasks:
            backward()
        inputs = counter.peak - held - self._gradient
        with counter.counting():
            self._layer.taken_gradients()
        deferred = counter.held
        tasks.reverse()
        with counter.counting():
            while tasks:
                tasks.pop()()
        return inputs, deferred, counter.peak - deferred

    def _again(self) -> tuple[int, int]:
        """What a forward keeps for the second one beside its input, and what that needs."""
        findings: Findings = deque()
        with AllocationCounter(self._device).counting(), first_forward(findings):
            self._layer.output_of(self._inputs, self._samples)
        parts = [part for each in findings for part in ([each] if isinstance(each, Tensor) else each)]
        found = sum(part.nbytes for part in parts)
        with self._layer.only_graph(), second_forward(findings):
            return found, self._forward()[1]

    def _forward(self) -> tuple[AllocationCounter, int, Callable[[], None]]:
        """A forward, at whose end nothing is left but what it keeps; what it has needed, and its backward."""
        counter, given = AllocationCounter(self._device), list[Bundle]()
        comes_in = INPUT not in self._layer.takes  # images lie in the batch
        with counter.counting():
            given += [map_entries(_copied, x) for x in self._inputs] if comes_in else self._inputs
        before = counter.held
        with counter.counting():
            y = [self._layer.output_of(given, self._samples)]
        needed = counter.peak - before
        with counter.counting():
            backward = self._backward_of(y.pop())
            given.clear()
        return counter, needed, backward

    @property
    def _gradient(self) -> int:
        """Bytes of the gradient of the output."""
        return sum(each.nbytes for each in self._learning)

    def _backward_of(self, y: Bundle) -> Callable[[], None]:
        """From ones; nothing without anything to learn up to here."""
        learning = [each for each in entries_of(y).values() if each.requires_grad]
        if not learning:
            return _nothing
        return backward_of(learning, self._ones)

    def _ones(self) -> list[Tensor]:
        return [torch.ones_like(each, device=self._device) for each in self._learning]


def _nothing() -> None:
    return


def _copied(x: Tensor) -> Tensor:
    bits = bits_of(x)
    copy = x.detach().clone().requires_grad_(x.requires_grad)
    return remember_bits(copy, None if bits is None else bits.clone())


def _without_values(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="meta")
