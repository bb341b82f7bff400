"""What the executor asks of the loss, of data parallelism, of gathered weights, and of what observes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from megasnn.bundle import Bundle
from megasnn.schedule import Action
from megasnn.telemetry.timers import Mark


class GradientSync(Protocol):
    """What the executor asks of data parallelism."""

    def begin(self, chunk: int, first_part: bool = False) -> None:
        """A backward of the chunk, or the first part of one, is about to add gradients, which are to be scattered."""

    def scatter(self, chunk: int) -> None:
        """The gradients that backwards have left for the chunk may go. Does not wait."""

    def finish(self, chunk: int) -> None:
        """The chunk's gradients of this step are complete. Does not wait for their reduction."""

    def wait(self) -> None:
        """Returns when all gradients are reduced."""


class WeightStore(Protocol):
    """What the executor asks of weights that are gathered when they are used. A unit is what it calls a chunk."""

    def unshard(self, unit: int) -> None:
        """Starts gathering a unit's weights; does not wait."""

    def wait_unshard(self, unit: int) -> None:
        """Returns when a unit's weights are here. Raises ValueError where they were not gathered."""

    def reshard(self, unit: int) -> None:
        """The gathered weights go."""


# (output of the model: logits [T, n, classes], or a bundle with them, labels) -> this micro-batch's share of the global
# batch's mean loss, a scalar
LossFunction = Callable[[Bundle, Tensor], Tensor]
# (output without gradient, labels), once for each micro-batch
OutputConsumer = Callable[[Bundle, Tensor], None]
# (action, start, end) of every action, as marks of `PipelineExecutor.clock`
ActionObserver = Callable[[Action, Mark, Mark], None]
