"""LAMB (You et al., arXiv 1904.00962): Adam's direction, and a step as long as the tensor is large."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor

Norms = Callable[[Mapping[Tensor, Tensor]], Mapping[Tensor, Tensor]]


class Lamb(torch.optim.Optimizer):
    """LAMB in the form of timm's `Lamb`, which follows NVIDIA's; published recipes of spiking transformers use it.

    Of a tensor p with gradient g, in step t:

        m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p
        p = p - lr |p| / |u| u

    The ratio of the norms is 1 where one of them is 0 (the paper's phi is the identity). It is also 1 in groups without
    weight decay, where the paper keeps it: biases and norms take Adam's step. timm's optimizer clips the global norm of
    the gradient to 1; here that is `--clip-grad`.

    Args:
        groups: each with its `weight_decay`.
        norms: of whole tensors, by parameter (megasnn.optim.ShardedNorms).
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, norms: Norms
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._norms = norms

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step, collective over the ranks that hold parts of the same tensors.

        Args:
            closure: computes loss and gradients again, as torch's optimizers take it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates: dict[Tensor, Tensor] = {}
        adapted: list[Tensor] = []
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            updates |= {parameter: self._update(parameter, group) for parameter in held}
            adapted += held if group["weight_decay"] else []
        ratios = self._ratios(adapted, updates)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in updates:
                    update = updates[parameter]
                    if parameter in ratios:
                        update.mul_(ratios[parameter])
                    parameter.sub_(update, alpha=group["lr"])
        return loss

    def _update(self, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Adam's direction with the weight decay: u of the formula; the moments go on."""
        state, gradient = self.state[parameter], parameter.grad
        if gradient is None:
            raise ValueError("a parameter without a gradient has no update")
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        steps, (beta1, beta2) = state["step"].item(), group["betas"]
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        below = (square.sqrt() / math.sqrt(1 - beta2**steps)).add_(group["eps"])
        update = (mean / (1 - beta1**steps)).div_(below)
        return update.add_(parameter, alpha=group["weight_decay"])

    def _ratios(self, adapted: Sequence[Tensor], updates: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """|p| / |u| by parameter, 1 where a norm is 0."""
        sizes = self._norms({parameter: parameter for parameter in adapted})
        lengths = self._norms({parameter: updates[parameter] for parameter in adapted})
        ratios = {}
        for parameter in adapted:
            size, length = sizes[parameter], lengths[parameter]
            ratios[parameter] = torch.where((size > 0) & (length > 0), size / length, 1.0)
        return ratios


def build(
    groups: Sequence[dict[str, Any]],
    lr: float,
    adam_beta1: float,
    adam_beta2: float,
    adam_eps: float,
    norms: Norms,
) -> Lamb:
    """For the table of optimizers."""
    return Lamb(groups, lr, (adam_beta1, adam_beta2), adam_eps, norms)
