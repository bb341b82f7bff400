"""LAMB (You et al., arXiv 1904.00962): Adam's direction, steps proportional to the tensor's norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megasnn.common.memory import copy_without_waiting
from megasnn.kernels.layout import flat_in_memory

Norms = Callable[[Mapping[Tensor, Tensor]], Mapping[Tensor, Tensor]]

EPS = 1e-6  # added to the denominator, as in timm


class Lamb(torch.optim.Optimizer):
    """LAMB as in timm's `Lamb`. For a tensor p with gradient g, in step t:

        m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p
        p = p - lr |p| / |u| u

    |p| / |u| is 1 if a norm is 0 (the paper's phi is the identity), and in groups without weight decay. timm's gradient
    clipping is `--clip-grad` here.

    Args:
        norms: whole tensors' norms by parameter (megasnn.optim.norms.ShardedNorms).
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, norms: Norms
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._norms = norms

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Collective over the ranks with parts of the same tensors."""
        # Operators on lists of tensors: the number of kernels does not grow with the number of tensors.
        updates: dict[Tensor, Tensor] = {}
        adapted: list[Tensor] = []
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                updates.update(zip(parameters, self._updates(parameters, group), strict=True))
                # Biases and norms take Adam's step, as in timm and unlike in the paper.
                if group["weight_decay"]:
                    adapted += parameters
        self._adapt(adapted, updates)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter in updates]
            if parameters:
                torch._foreach_sub_(parameters, [updates[each] for each in parameters], alpha=group["lr"])

    def _updates(self, parameters: list[Tensor], group: Mapping[str, Any]) -> Sequence[Tensor]:
        """The formula's u; updates m and v."""
        gradients: list[Tensor] = []
        steps: list[Tensor] = []
        means: list[Tensor] = []
        squares: list[Tensor] = []
        for parameter in parameters:
            assert parameter.grad is not None
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
            steps.append(state["step"])
            means.append(state["exp_avg"])
            squares.append(state["exp_avg_sq"])
        beta1, beta2 = group["betas"]
        torch._foreach_add_(steps, 1)
        counts = [step.item() for step in steps]  # on the host: no wait for a device
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        below = torch._foreach_sqrt(squares)
        torch._foreach_div_(below, [math.sqrt(1 - beta2**count) for count in counts])
        torch._foreach_add_(below, group["eps"])
        updates = torch._foreach_div(means, [1 - beta1**count for count in counts])
        torch._foreach_div_(updates, below)
        torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        return updates

    def _adapt(self, adapted: Sequence[Tensor], updates: Mapping[Tensor, Tensor]) -> None:
        parameter_norms = self._norms({each: each for each in adapted})
        update_norms = self._norms({each: updates[each] for each in adapted})
        # After the collectives: other ranks may have adapted tensors.
        if not adapted:
            return
        sizes = torch.stack([parameter_norms[each] for each in adapted])
        lengths = torch.stack([update_norms[each] for each in adapted])
        ratios = torch.where((sizes > 0) & (lengths > 0), sizes / lengths, 1.0)
        # The ratios are known on the device only, and no list operator takes a device factor for each tensor.
        flat = [flat_in_memory(updates[each]) for each in adapted]
        counts = [each.numel() for each in flat]
        repeats = copy_without_waiting(torch.tensor(counts), ratios.device)
        factors = ratios.to(flat[0].dtype).repeat_interleave(repeats, output_size=sum(counts))
        torch._foreach_mul_(flat, factors.split(counts))


def build_lamb(
    groups: Sequence[dict[str, Any]],
    lr: float,
    norms: Norms,
    adam_beta1: float,
    adam_beta2: float,
    adam_eps: float | None,
) -> Lamb:
    eps = EPS if adam_eps is None else adam_eps
    return Lamb(groups, lr, (adam_beta1, adam_beta2), eps, norms)
