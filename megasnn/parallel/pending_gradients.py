"""Counting a step's gradients, so that a bucket's reduction starts with its last one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor


class PendingGradients:
    """Number of gradients that a bucket still expects in a step.

    Args:
        expected: by parameter, in one micro-batch; 0: any number until `end`.
        complete: called when the last one has arrived.
    """

    # Python's garbage collector finds no cycle through a tensor's hooks. So hooks reference this object, which holds no
    # tensor: with the bucket it would keep the weights and the gradients alive for ever.

    def __init__(self, expected: Sequence[int], complete: Callable[[], None]) -> None:
        self.unfinished = 0
        self._expected = expected
        self._left = [0] * len(expected)
        self._complete = complete

    def begin(self, micro_batches: int) -> None:
        # Below 0 a count never becomes 0.
        self._left = [micro_batches * each or -1 for each in self._expected]
        self.unfinished = len(self._left)

    def end(self) -> None:
        """Expects no more."""
        self._left = [0] * len(self._left)
        self.unfinished = 0

    def count(self, index: int, parameter: Tensor) -> None:
        """Counts a parameter's gradient. Raises ValueError for an unexpected one."""
        left = self._left[index]
        if left == 0:
            raise ValueError(
                f"a layer with a weight of shape {list(parameter.shape)} was called more often than in the dry run, or "
                "the module around it uses the weight as well: call the layer equally often in every forward, and use "
                "its weight only by calling the layer"
            )
        self._left[index] = left - 1
        if left == 1:
            self.unfinished -= 1
            if self.unfinished == 0:
                self._complete()
