"""The losses by name. What they compute is in `sums`, which needs torch; the table does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megasnn.registry import Registry, later


@dataclass(frozen=True)
class Loss:
    """
    Attributes:
        summary: for --help.
        sum: (what the model's last layer gives: logits `[T, N, classes]`, or a bundle with them, labels,
            label_smoothing=...) -> the sum of the samples' losses.
        mixes: labels may be probabilities `[N, classes]`, as mixed samples have them.
    """

    summary: str
    sum: Callable[..., Any]
    mixes: bool = False


_SUMS = "megasnn.losses.sums"

LOSSES: Registry[Loss] = Registry(
    "--loss",
    {
        "cross-entropy": Loss("of the logits' mean over time", later(f"{_SUMS}:cross_entropy_sum"), mixes=True),
        "tet": Loss("cross-entropy of each time step (Deng et al. 2022)", later(f"{_SUMS}:tet_sum"), mixes=True),
        "mse": Loss("squared distance of the mean over time from 0 and 1", later(f"{_SUMS}:mse_sum"), mixes=True),
    },
)
