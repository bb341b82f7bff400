"""LAMB (You et al., arXiv 1904.00962): Adam's direction, and a step as long as the tensor is large."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megasnn.common.memory import without_waiting
from megasnn.kernels.layout import flat_in_memory

Norms = Callable[[Mapping[Tensor, Tensor]], Mapping[Tensor, Tensor]]

EPS = 1e-6  # added to the denominator, as in timm


class Lamb(torch.optim.Optimizer):
    """LAMB in the form of timm's `Lamb`, which follows NVIDIA's; published recipes of spiking transformers use it.

    Of a tensor p with gradient g, in step t:

        m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p
        p = p - lr |p| / |u| u

    The ratio of the norms is 1 where one of them is 0 (the paper's phi is the identity). It is also 1 in groups without
    weight decay, where the paper keeps it: biases and norms take Adam's step. timm's optimizer clips the global norm of
    the gradient to 1; here that is `--clip-grad`.

    Tensors are taken together: what is started on a GPU does not grow with their number.

    Args:
        groups: each with its `weight_decay`.
        norms: of whole tensors, by parameter (megasnn.optim.norms.ShardedNorms).
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, norms: Norms
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._norms = norms

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Takes one step, collective over the ranks that hold parts of the same tensors."""
        updates: dict[Tensor, Tensor] = {}
        adapted: list[Tensor] = []
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            if held:
                updates.update(zip(held, self._updates(held, group), strict=True))
                adapted += held if group["weight_decay"] else []
        self._adapt(adapted, updates)
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter in updates]
            if held:
                torch._foreach_sub_(held, [updates[each] for each in held], alpha=group["lr"])

    def _updates(self, parameters: list[Tensor], group: Mapping[str, Any]) -> Sequence[Tensor]:
        """Adam's direction with the weight decay: u of the formula; the moments go on."""
        gradients = [each.grad for each in parameters if each.grad is not None]
        states = [self.state[each] for each in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        steps, means, squares = ([state[kind] for state in states] for kind in ("step", "exp_avg", "exp_avg_sq"))
        torch._foreach_add_(steps, 1)
        counts, (beta1, beta2) = [step.item() for step in steps], group["betas"]  # they are in the host's memory
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
        """Multiplies each update by |p| / |u|, or by 1 where a norm is 0."""
        norms = self._norms({each: each for each in adapted}), self._norms({each: updates[each] for each in adapted})
        if not adapted:
            return
        sizes, lengths = (torch.stack([found[each] for each in adapted]) for found in norms)
        ratios = torch.where((sizes > 0) & (lengths > 0), sizes / lengths, 1.0)
        # No operator takes a list of tensors and a factor for each that only the device knows: a tensor of factors.
        flat = [flat_in_memory(updates[each]) for each in adapted]
        counts = [each.numel() for each in flat]
        repeats = without_waiting(torch.tensor(counts), ratios.device)
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
    """Builds the optimizer for the registry."""
    return Lamb(groups, lr, (adam_beta1, adam_beta2), EPS if adam_eps is None else adam_eps, norms)
