"""Readout of recurrent networks: leaky integrators that do not fire."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megasnn.kernels.torch_backend import REDUCED
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.linear import ParallelLinear


class LeakyReadout(ParallelLinear):
    """Linear layer and leaky integrators: `[T, N, C_local]` -> logits `[T, N, num_classes]`.

        u_t = d u_{t-1} + (1 - d) (W s_t + bias), with d = exp(-1 / tau)

    Both papers sum the softmax of u over time, and take the cross entropy of this sum. So the logits are T softmax(u),
    whose mean over time is the sum.

    Args:
        tau: in time steps.
        sums_softmax: False for logits u, whose mean arXiv 2408.07517 takes on SSC.
    Raises:
        ValueError: stateful neurons (--bptt-steps).
    """

    multiplies_by_weight = True

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        context: BuildContext | None = None,
        *,
        tau: float = 15.0,
        sums_softmax: bool = True,
        **options: Any,
    ) -> None:
        context = context_for(context)
        if context.stateful:
            raise ValueError("--bptt-steps with a LeakyReadout, which takes all time steps; leave it out")
        super().__init__(in_features, num_classes, context, **options)
        self.tau = tau
        self.sums_softmax = sums_softmax

    def forward(self, x: Tensor) -> Tensor:
        currents = super().forward(x)
        if x.is_meta:
            return currents
        if currents.dtype in REDUCED:
            currents = currents.float()
        steps = len(currents)
        # All steps at once: u is a product with powers of d, since nothing fires.
        ago = torch.arange(steps, device=x.device).view(-1, 1) - torch.arange(steps, device=x.device)
        decay = math.exp(-1 / self.tau)
        powers = (decay ** ago.clamp(min=0).to(currents.dtype)).tril() * (1 - decay)
        u = (powers @ currents.flatten(1)).view_as(currents)
        return steps * u.softmax(-1) if self.sums_softmax else u
