"""Parallel spiking neurons (PSN, arXiv 2304.12760): a learned product over time, no recurrence."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megasnn.kernels import NeuronSpec
from megasnn.kernels.spike_codec import pack_bits, remember_bits, wants_bits
from megasnn.kernels.torch_backend import computed_in, recompute_in_backward, surrogate_function
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.init import constant, uniform
from megasnn.layers.neuron import NeuronLayer
from megasnn.layers.tensors import declare
from megasnn.parallel.sharding import Initialiser


class _ParallelInTime(NeuronLayer):
    """Spikes for W x + b >= 0 with W `[T, T]`, without potential and reset.

    Args:
        spec: surrogate, and `v_threshold`, the initial -b; None for SpikingJelly's defaults.
    Raises:
        ValueError: stateful neurons (--bptt-steps); in forward, weights for another T.
    """

    kind: str
    weight: Tensor
    bias: Tensor

    def __init__(
        self,
        spec: NeuronSpec | None,
        context: BuildContext,
        weight: tuple[tuple[int, ...], Initialiser],
        bias_shape: tuple[int, ...],
    ) -> None:
        super().__init__(context)
        if context.stateful:
            raise ValueError(f"--bptt-steps with a {self.kind} neuron, which takes all time steps; leave it out")
        self.spec = spec = spec or NeuronSpec(self.kind, surrogate="atan")
        shape, initialise = weight
        # Every rank holds the whole weights, and sees own channels: gradients are summed over the ranks.
        weight_shard = context.shard(shape, partial_gradient=True, initialise=initialise)
        threshold = constant(-spec.v_threshold)
        bias_shard = context.shard(bias_shape, partial_gradient=True, initialise=threshold)
        declare(self, "weight", weight_shard, context.dtype)
        declare(self, "bias", bias_shard, context.dtype)

    @abstractmethod
    def matrix(self, weight: Tensor, steps: int) -> Tensor:
        """W `[steps, steps]`."""

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.at_every_step(x)
        if self.weight.ndim > 1 and len(self.weight) != len(inputs):
            raise ValueError(f"this neuron has weights for {len(self.weight)} time steps, got {len(inputs)}")
        if x.is_meta:
            return self.observe(torch.empty_like(inputs))
        fire = surrogate_function(self.spec.surrogate, self.spec.surrogate_alpha)
        compute = partial(_fire_at_once, matrix=self.matrix, fire=fire)
        # Backward stores the input only.
        (spikes,) = recompute_in_backward(compute, inputs, self.weight, self.bias)
        bits = pack_bits(spikes) if wants_bits(spikes) else None
        return self.observe(remember_bits(spikes, bits))


class ParallelPSN(_ParallelInTime):
    """PSN with weights between all pairs of time steps (SpikingJelly's PSN). T is fixed."""

    kind = "psn"

    def __init__(self, spec: NeuronSpec | None = None, context: BuildContext | None = None) -> None:
        context = context_for(context)
        steps = context.time_steps
        super().__init__(spec, context, ((steps, steps), uniform(steps)), (steps, 1))

    def matrix(self, weight: Tensor, steps: int) -> Tensor:
        return weight


class ParallelMaskedPSN(ParallelPSN):
    """PSN whose time steps see themselves and the last ones. T is fixed.

    SpikingJelly's MaskedPSN with lambda_ 1. Its users raise lambda_ in training until all other weights are masked;
    that is not possible here.

    Args:
        order: the paper's k, the number of steps seen.
    """

    def __init__(self, spec: NeuronSpec | None = None, context: BuildContext | None = None, *, order: int) -> None:
        super().__init__(spec, context)
        self.order = order

    def matrix(self, weight: Tensor, steps: int) -> Tensor:
        return weight.tril().triu(1 - self.order)


class ParallelSlidingPSN(_ParallelInTime):
    """Each time step uses the same weights for the last `order` steps (SpikingJelly's SlidingPSN).

    Args:
        order: the paper's k. Initial weights: 1 for the current step, half with each earlier one.
    """

    kind = "sliding_psn"

    def __init__(self, spec: NeuronSpec | None = None, context: BuildContext | None = None, *, order: int = 2) -> None:
        super().__init__(spec, context_for(context), ((order,), _halving), ())

    def matrix(self, weight: Tensor, steps: int) -> Tensor:
        lags = weight.flip(0)[:steps]
        bands = torch.stack([weight.new_ones(steps - lag).diag(-lag) for lag in range(len(lags))])
        return (lags.view(-1, 1, 1) * bands).sum(0)


def _halving(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.copy_(0.5 ** torch.arange(len(tensor) - 1, -1, -1, dtype=torch.float64))


def _fire_at_once(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    matrix: Callable[[Tensor, int], Tensor],
    fire: Callable[[Tensor], Tensor],
) -> tuple[Tensor]:
    """Channels last in memory. Computes reduced types in float32."""
    dtype = computed_in(x)
    channels = min(2, x.ndim - 1)
    rows = x.to(dtype).movedim(channels, -1)
    h = torch.addmm(bias.to(dtype), matrix(weight.to(dtype), len(x)), rows.flatten(1))
    return (fire(h).view(rows.shape).movedim(-1, channels).to(x.dtype),)
