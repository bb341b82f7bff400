"""Layers whose result depends on which samples they compute, not only on the values."""

from __future__ import annotations

from torch import nn


class KeyedLayer(nn.Module):
    """A layer with `forward(x, samples)` in place of `forward(x)`.

    `samples` are the positions of the micro-batch's N samples in the whole training (0 for the very first one): what a
    keyed random number hangs on. They come with every call, so that several micro-batches can be under way, and a
    forward that is computed again sees the same. None where positions mean nothing, in evaluation.
    """

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers itself, in training."""
        return False
