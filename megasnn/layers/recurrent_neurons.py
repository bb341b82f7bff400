"""Leaky and adaptive neurons with recurrent weights, for spiking audio.

After Bittar and Garner (2022, doi 10.3389/fnins.2022.865897; code github.com/idiap/sparch, commit f875625) and Baronig
et al. (arXiv 2408.07517; code github.com/IGITUGraz/SE-adlif, commit e980397). Their code fires above the threshold,
here a neuron fires from the threshold on, like all others.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megasnn.layers.context import BuildContext
from megasnn.layers.recurrent import Constants, Range, RecurrentNeuron, RecurrentState


class RecurrentLIF(RecurrentNeuron):
    """Leaky integrate-and-fire with recurrent weights (RLIF; Bittar and Garner 2022).

        u_t = alpha (u_{t-1} - s_{t-1}) + (1 - alpha) (x_t + V s_{t-1})
        s_t = 1 where u_t >= 1

    alpha is learned for each neuron, from exp(-1/5) to exp(-1/25), and clamped to these bounds.
    V has no diagonal. The surrogate is a box of width 1 around the threshold.
    The authors start at random potentials and spikes; here a sample starts at zero.
    """

    alpha: Tensor
    alpha_bounds: Range = (math.exp(-1 / 5), math.exp(-1 / 25))

    def __init__(self, channels: int, context: BuildContext | None = None, **options: Any) -> None:
        published: dict[str, Any] = {"self_connections": False, "surrogate": "rect"}
        super().__init__(channels, context, **published | options)
        self.per_channel("alpha", self.alpha_bounds)

    def constants(self) -> Constants:
        return {"alpha": self.alpha.clamp(*self.alpha_bounds)}

    def step(self, current: Tensor, state: RecurrentState, constants: Constants) -> RecurrentState:
        alpha = constants["alpha"]
        u = alpha * (state.u - state.s) + (1 - alpha) * current
        return state._replace(u=u, s=self.fire(u))


class RecurrentAdLIF(RecurrentLIF):
    """Adaptive LIF with recurrent weights (RadLIF; Bittar and Garner 2022).

        w_t = beta w_{t-1} + a u_{t-1} + b s_{t-1}
        u_t = alpha (u_{t-1} - s_{t-1}) + (1 - alpha) (x_t + V s_{t-1} - w_t)
        s_t = 1 where u_t >= 1

    Learned for each neuron, and clamped to the bounds they start between: alpha as in `RecurrentLIF`, beta from
    exp(-1/30) to exp(-1/120), a from -1 to 1, b from 0 to 2.
    """

    beta: Tensor
    a: Tensor
    b: Tensor
    beta_bounds: Range = (math.exp(-1 / 30), math.exp(-1 / 120))
    a_bounds: Range = (-1.0, 1.0)
    b_bounds: Range = (0.0, 2.0)

    def __init__(self, channels: int, context: BuildContext | None = None, **options: Any) -> None:
        super().__init__(channels, context, **options)
        self.per_channel("beta", self.beta_bounds)
        self.per_channel("a", self.a_bounds)
        self.per_channel("b", self.b_bounds)

    def constants(self) -> Constants:
        beta = self.beta.clamp(*self.beta_bounds)
        a = self.a.clamp(*self.a_bounds)
        return super().constants() | {"beta": beta, "a": a, "b": self.b.clamp(*self.b_bounds)}

    def step(self, current: Tensor, state: RecurrentState, constants: Constants) -> RecurrentState:
        alpha = constants["alpha"]
        w = constants["beta"] * state.w + constants["a"] * state.u + constants["b"] * state.s
        u = alpha * (state.u - state.s) + (1 - alpha) * (current - w)
        return RecurrentState(u, self.fire(u), w)


class SymplecticAdLIF(RecurrentNeuron):
    """Adaptive LIF by the symplectic Euler method, with recurrent weights (SE-adLIF, arXiv 2408.07517).

        h_t = d_u u_{t-1} + (1 - d_u) (x_t + V s_{t-1} - w_{t-1})
        s_t = 1 where h_t >= 1
        u_t = h_t (1 - s_t), where s_t has no gradient
        w_t = d_w w_{t-1} + (1 - d_w) q (a u_t + b s_t)

    with d_u = exp(-1 / tau_u) and d_w = exp(-1 / tau_w), in time steps.
    Learned for each neuron, from 0 to 1: `u_part` and `w_part`, the positions of tau_u and tau_w in their bounds; `a`;
    and from 0 to 2: `b`. The authors clamp them after every update. Here forward clamps them, and the gradient of a
    value outside is the one that leads back.
    The surrogate is SLAYER's with 0.4 of its height.

    Args:
        tau_u, tau_w: bounds of the time constants of potential and adaptation.
        q: scale of the adaptation.
    """

    u_part: Tensor
    w_part: Tensor
    a: Tensor
    b: Tensor

    def __init__(
        self,
        channels: int,
        context: BuildContext | None = None,
        *,
        tau_u: Range = (5.0, 25.0),
        tau_w: Range = (60.0, 300.0),
        q: float = 120.0,
        **options: Any,
    ) -> None:
        published: dict[str, Any] = {"surrogate": "slayer"}
        super().__init__(channels, context, **published | options)
        self.tau_u = tau_u
        self.tau_w = tau_w
        self.q = q
        self.per_channel("u_part", (0.0, 1.0))
        self.per_channel("w_part", (0.0, 1.0))
        self.per_channel("a", (0.0, 1.0))
        self.per_channel("b", (0.0, 2.0))

    def constants(self) -> Constants:
        return {
            "u_decay": _decay(self.u_part, self.tau_u),
            "w_decay": _decay(self.w_part, self.tau_w),
            "a": _project(self.a, 1.0),
            "b": _project(self.b, 2.0),
        }

    def step(self, current: Tensor, state: RecurrentState, constants: Constants) -> RecurrentState:
        u_decay = constants["u_decay"]
        w_decay = constants["w_decay"]
        h = u_decay * state.u + (1 - u_decay) * (current - state.w)
        s = self.fire(h)
        u = h * (1 - s.detach())
        w = w_decay * state.w + (1 - w_decay) * self.q * (constants["a"] * u + constants["b"] * s)
        return RecurrentState(u, s, w)


def _decay(part: Tensor, bounds: Range) -> Tensor:
    low, high = bounds
    return torch.exp(-1 / (low + (high - low) * _project(part, 1.0)))


def _project(x: Tensor, highest: float) -> Tensor:
    # torch.export follows no autograd functions of Python.
    if x.requires_grad and torch.is_grad_enabled():
        return _Project.apply(x, highest)
    return x.clamp(0, highest)


class _Project(torch.autograd.Function):
    """Clamps to 0 ... highest; outside, backward passes only the gradient whose step leads back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, highest: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.highest = highest
        return x.clamp(0, highest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        # An optimizer's steps stay at a bound for as long as they would leave it, as if each were clamped.
        leaves = ((x < 0) & (grad > 0)) | ((x > ctx.highest) & (grad < 0))
        return grad.masked_fill(leaves, 0.0), None
