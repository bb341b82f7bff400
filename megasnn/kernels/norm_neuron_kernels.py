"""Base classes of a backend's kernels, and the values they take.

A backend normalises, pools and fires in four calls. Between them, ranks with a common micro-batch exchange sums.
Kernels are prepared for one input shape and type: sizes, launches and output shapes are computed once, not in a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from megasnn.kernels.neuron_spec import NeuronSpec

Intermediate = TypeVar("Intermediate")
"""Intermediate result that a backend's `backward_sums` hands to its `input_gradient`."""


# Compared by identity: every forward looks up the kernels that are prepared for it, and hashing the fields would take
# longer than the rest of the search.
@dataclass(frozen=True, eq=False)
class NormNeuron:
    """Batch norm, optional max pooling and neurons, without their tensors. A layer makes one and keeps it.

    Attributes:
        eps: added to the variance.
        pool: max pooling between norm and neurons; needs `[T, N, C, H, W]`.
        time_steps: the spikes' T. An input with a single time step is repeated at every step.
        above: with pooling, the number of input rows, 0 or 1, before the first windows' middle row. With 1 the first
            row belongs to another rank, and the second is an even row of the image.
    """

    spec: NeuronSpec
    eps: float
    pool: bool
    time_steps: int
    above: int = 0

    def shape_of_spikes(self, x: Tensor) -> tuple[int, ...]:
        """Shape for an input `[X, N, C, ...]`."""
        return self.time_steps, *x.shape[1:3], *self.space_of_spikes(x.shape[3:])

    def space_of_spikes(self, space: Sequence[int]) -> tuple[int, ...]:
        if not self.pool:
            return tuple(space)
        height, width = space
        return (height - self.above + 1) // 2, (width + 1) // 2


class NeuronUse(NamedTuple):
    """Neurons of a model, as far as they decide which kernels are compiled."""

    spec: NeuronSpec
    has_norm: bool
    pools: bool = False


class Shared(Protocol):
    """Exchange between ranks whose values are normalised together."""

    def statistics(self, own: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Merges the ranks' means and biased variances `[2, C]`, each over `count` values; adds the counts."""

    def total(self, sums: Tensor) -> Tensor:
        """Sum over the ranks."""


class BatchNorm(NamedTuple):
    """Batch norm before neurons.

    Attributes:
        weight, bias: scale and shift `[C]`, or None.
        running: mean and variance `[C]`; None for input statistics over time, samples and space.
        shared: exchange with other ranks; None where this rank has all values.
    """

    weight: Tensor | None = None
    bias: Tensor | None = None
    running: tuple[Tensor, Tensor] | None = None
    shared: Shared | None = None


class Statistics(NamedTuple):
    """A micro-batch's statistics, which the norm normalises with.

    Attributes:
        moments: each channel's mean and biased variance, `[2, C]` in double precision.
        coefficients: see `NormNeuronInput`; None where they were not asked for, or the backend has none.
    """

    moments: Tensor
    coefficients: Tensor | None = None


class NormNeuronInput(NamedTuple):
    """Input of norm and neurons, with statistics to normalise with.

    Attributes:
        x: `[X, N, C, ...]` with X = T or 1, channels-last in memory.
        mean, variance: `[C]`, the biased variance, in double precision.
        weight, bias: the norm's scale and shift `[C]`, or None.
        w: a learned time constant's scalar parameter, or None.
        coefficients: scale, shift and mean in the backend's layout; None if its kernels compute them.
    """

    x: Tensor
    mean: Tensor
    variance: Tensor
    weight: Tensor | None
    bias: Tensor | None
    w: Tensor | None = None
    coefficients: Tensor | None = None


class NeuronInput(NamedTuple):
    """Neurons without a norm.

    Attributes:
        x: `[T, N, ..., C]`, contiguous.
        v0: potential before the first step, `[N, ..., C]`; None at rest.
    """

    x: Tensor
    v0: Tensor | None
    w: Tensor | None


class BackwardSums(NamedTuple, Generic[Intermediate]):
    """A backward's sums over this rank's samples and pixels.

    Attributes:
        sums: `[3, C]` in double precision: g, the normalised input's gradient; g (x - mean); the sum for
            `gradient_of_w`, which may be missing where nothing is learned.
        g_weight, g_bias: gradients `[C]` for the norm's scale and shift, in their types; None for an absent one.
    """

    sums: Tensor
    intermediate: Intermediate
    g_weight: Tensor | None
    g_bias: Tensor | None


class NormNeuronKernels(ABC, Generic[Intermediate]):
    """One backend's kernels for one input shape and type. Inputs and spikes are channels-last in memory.

    Args:
        shape, dtype: of the input `[X, N, C, ...]`.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, norm_neuron: NormNeuron) -> None:
        self.shape = shape
        self.dtype = dtype
        self.norm_neuron = norm_neuron
        self.channels = shape[2]
        self.values_per_channel = shape.numel() // self.channels
        self.largest = norm_neuron.spec.largest

    @abstractmethod
    def statistics(self, x: Tensor, norm: BatchNorm | None = None) -> Statistics:
        """With `norm`, a backend that has coefficients computes them in the same pass."""

    def coefficients(self, mean: Tensor, variance: Tensor, norm: BatchNorm) -> Tensor | None:
        """Coefficients (see `NormNeuronInput`) from statistics that are not this rank's alone."""
        return None

    @abstractmethod
    def fire(self, inputs: NormNeuronInput, packed: bool = False) -> tuple[Tensor, Tensor | None]:
        """Spikes `[T, N, C, ...]` in x's type; with `packed` also their bits (`spike_codec.pack_bits`)."""

    @abstractmethod
    def backward_sums(
        self, inputs: NormNeuronInput, g_spikes: Tensor, learn: bool, count: int | None = None
    ) -> BackwardSums[Intermediate]:
        """Sums from the spikes' gradient.

        Args:
            learn: the gradient of w is wanted.
            count: values a channel where `input_gradient` takes these sums as they are; None where other ranks add to
                them, or it takes none.
        """

    @abstractmethod
    def input_gradient(
        self, inputs: NormNeuronInput, g_spikes: Tensor, sums: Tensor | None, count: int, intermediate: Intermediate
    ) -> Tensor:
        """Gradient with respect to x.

        Args:
            sums: `BackwardSums.sums` over `count` values a channel; None where the statistics do not depend on x.
        """


class NeuronKernels(ABC):
    """One backend's kernels for neurons without a norm, for one input shape `[T, N, ...]` and type."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, spec: NeuronSpec) -> None:
        self.shape = shape
        self.dtype = dtype
        self.spec = spec

    @abstractmethod
    def multi_step(self, x: Tensor, v0: Tensor | None, w: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `megasnn.kernels.neuron.neuron_multi_step`; with gradients."""


def parameter_gradients(sums: Tensor, inputs: NormNeuronInput, eps: float) -> tuple[Tensor | None, Tensor | None]:
    """Gradients for the norm's scale and shift, from `BackwardSums.sums`."""
    g_weight = None
    g_bias = None
    if inputs.weight is not None:
        g_weight = (sums[1] * (inputs.variance + eps).rsqrt()).to(inputs.weight.dtype)
    if inputs.bias is not None:
        g_bias = sums[0].to(inputs.bias.dtype)
    return g_weight, g_bias


def gradient_of_w(total: Tensor, w: Tensor, spec: NeuronSpec) -> Tensor:
    """Gradient for a learned time constant's w; the kernels' sum `total` lacks a factor q = sigmoid(w)."""
    q = w.detach().double().sigmoid()
    factor = (1 - q) / q if spec.decay_input else q * (1 - q)
    return (total * factor).view(w.shape).to(w.dtype)
