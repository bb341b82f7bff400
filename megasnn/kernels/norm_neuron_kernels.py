"""Base class of a backend's norm, pooling and neuron kernels, and the values they take.

A backend normalises, pools and fires in four calls. Between them, ranks with a common micro-batch exchange sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from megasnn.kernels.neuron_spec import NeuronSpec

Intermediate = TypeVar("Intermediate")
"""Intermediate result that a backend's `backward_sums` hands to its `input_gradient`."""


@dataclass(frozen=True)
class NormNeuron:
    """Batch norm, optional max pooling and neurons, without their tensors.

    Attributes:
        eps: added to the variance.
        pool: max pooling between norm and neurons; needs `[T, N, C, H, W]`.
        time_steps: the spikes' T. An input with a single time step is repeated at every step.
        above: with pooling, the number of input rows, 0 or 1, before the first windows' middle row.
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


class Norm(NamedTuple):
    """
    Attributes:
        mean, variance: `[C]`, the biased variance, in double precision.
        weight, bias: scale and shift `[C]`, or None.
        coefficients: scale, shift and mean in the backend's layout; None if its kernels compute them.
    """

    mean: Tensor
    variance: Tensor
    weight: Tensor | None
    bias: Tensor | None
    coefficients: Tensor | None = None


class Affine(NamedTuple):
    """A norm's scale and shift, `[C]` or None, and the number added to its variance."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float


class Statistics(NamedTuple):
    """
    Attributes:
        values: each channel's mean and biased variance, `[2, C]` in double precision.
        coefficients: see `Norm`; None where they were not asked for, or the backend has none.
    """

    values: Tensor
    coefficients: Tensor | None = None


class NormNeuronInput(NamedTuple):
    """
    Attributes:
        x: `[X, N, C, ...]` with X = T or 1, channels-last in memory.
        w: a learned time constant's scalar parameter, or None.
    """

    x: Tensor
    norm: Norm
    w: Tensor | None
    norm_neuron: NormNeuron


class NeuronInput(NamedTuple):
    """Neurons without a norm.

    Attributes:
        x: `[T, N, ..., C]`, contiguous.
        v0: potential before the first step, `[N, ..., C]`; None at rest.
    """

    x: Tensor
    v0: Tensor | None
    w: Tensor | None
    spec: NeuronSpec


class ParameterGradients(NamedTuple):
    """Gradients `[C]` for a norm's scale and shift, in their types; None for an absent one."""

    weight: Tensor | None
    bias: Tensor | None


class BackwardSums(NamedTuple, Generic[Intermediate]):
    """A backward's sums over this rank's samples and pixels.

    Attributes:
        sums: `[3, C]` in double precision: g, the normalised input's gradient; g (x - mean); the sum for
            `gradient_of_w`, which may be missing where nothing is learned.
        of_norm: the norm's parameter gradients, where they come with the sums.
    """

    sums: Tensor
    intermediate: Intermediate
    of_norm: ParameterGradients | None


class NormNeuronKernels(ABC, Generic[Intermediate]):
    """One backend's kernels. Inputs and spikes are channels-last in memory."""

    @abstractmethod
    def statistics(self, x: Tensor, affine: Affine | None = None) -> Statistics:
        """With `affine`, a backend that has coefficients works them out in the same pass."""

    def coefficients(self, norm: Norm, eps: float, dtype: torch.dtype) -> Tensor | None:
        """Coefficients (see `Norm`) for this input type, from statistics that are not this rank's alone."""
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

    @abstractmethod
    def neuron_multi_step(
        self, x: Tensor, spec: NeuronSpec, v0: Tensor | None, w: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `megasnn.kernels.neuron.neuron_multi_step`; with gradients."""


def gradient_of_w(total: Tensor, w: Tensor, spec: NeuronSpec) -> Tensor:
    """Gradient for a learned time constant's w; the kernels' sum `total` lacks a factor q = sigmoid(w)."""
    q = w.detach().double().sigmoid()
    factor = (1 - q) / q if spec.decay_input else q * (1 - q)
    return (total * factor).view(w.shape).to(w.dtype)
