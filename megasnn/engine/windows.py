"""Joins what a model gives for the windows of a sample's time steps."""

from __future__ import annotations

import torch

from megasnn.bundle import Bundle, bundle_of, entries_of


class Windows:
    """The model's outputs for the windows of the same samples, until there are all of them.

    Args:
        count: windows that together are all time steps; 1: each output has all of them.
    """

    def __init__(self, count: int) -> None:
        self.count, self._earlier = count, list[Bundle]()

    def joined(self, output: Bundle) -> Bundle | None:
        """The output for all time steps, with the last window of the samples; None before."""
        if self.count == 1:
            return output
        self._earlier.append(output)
        if len(self._earlier) < self.count:
            return None
        windows = [entries_of(each) for each in self._earlier]
        self.forget()
        whole: Bundle = bundle_of({key: torch.cat([each[key] for each in windows]) for key in windows[0]})
        return whole

    def forget(self) -> None:
        """What windows have left goes."""
        self._earlier = []
