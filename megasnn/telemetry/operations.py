"""Synaptic operations of a sample, counted where products are formed, and an estimate of their energy.

Names and definitions are those of NeuroBench 2.3.0 (Yik et al. 2025, arXiv 2304.04640). Each value of a product's input
that is not 0 is an operation for every output that it goes into; padding and biases are none. Operations are
accumulations (ACs) where all values are 0, 1 or -1, otherwise multiply-adds (MACs). NeuroBench decides that for each
call; here the whole evaluation decides, so that no layout and no size of a batch changes it. Products of two
activations, as in attention, have no weights and are not counted.

Energies are those of single float32 operations in 45 nm (Horowitz, ISSCC 2014): arithmetic alone, on hardware that
skips zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

MAC_JOULES, AC_JOULES = 4.6e-12, 0.9e-12

TimesUsed = Callable[[Sequence[int]], Tensor]
"""Height and width of images -> number of outputs that a value at each pixel goes into, of the same shape."""


class Counted(NamedTuple):
    """Operations of a product over all samples. is_spiking: False where an input was neither 0, 1 nor -1."""

    operations: float
    is_spiking: bool

    def plus(self, other: Counted) -> Counted:
        return Counted(self.operations + other.operations, self.is_spiking and other.is_spiking)


class LayerOperations(NamedTuple):
    """Operations of a convolution or linear layer in a sample's forward."""

    name: str
    effective_macs: float
    effective_acs: float

    @property
    def energy_mj(self) -> float:
        """In millijoules."""
        return 1e3 * (self.effective_macs * MAC_JOULES + self.effective_acs * AC_JOULES)


_is_counting: ContextVar[bool] = ContextVar("is_counting", default=True)


@contextmanager
def not_counting() -> Iterator[None]:
    """Around the forward of samples that are no samples of the data."""
    token = _is_counting.set(False)
    try:
        yield
    finally:
        _is_counting.reset(token)


EXACT_FLOAT32 = 1 << 24  # up to here float32 holds every whole number


class _Seen(NamedTuple):
    """Counts of a product's inputs of one height and width, on the device.

    Attributes:
        nonzero: number of values at each pixel that are not 0. others: above 0 where a value is neither 0, 1 nor -1.
        times_used: outputs that a value at each pixel goes into, at all time steps that it stands for.
    """

    nonzero: Tensor
    others: Tensor
    times_used: Tensor


class OperationCounter:
    """Counts the operations of this rank's products, without waiting for the device."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, torch.Size], _Seen] = {}

    @torch.no_grad()
    def observe(self, name: str, x: Tensor, times_used: TimesUsed, steps: int = 1, are_spikes: bool = False) -> None:
        """Adds the operations of one product.

        Args:
            x: images `[frames, C, H, W]`, or of other dimensions behind the channels.
            steps: number of time steps that each frame stands for, the same in every call.
            are_spikes: True where the values are known to be 0 or 1.
        """
        if not _is_counting.get():
            return
        space = x.shape[2:]
        if (name, space) not in self._seen:
            used = steps * times_used(space).to(x.device)
            self._seen[name, space] = _Seen(torch.zeros_like(used), used.new_zeros(()), used)
        seen = self._seen[name, space]
        # Sums of ones take a tenth of the time of torch.count_nonzero on a CPU.
        is_exact = x.shape[0] * x.shape[1] <= EXACT_FLOAT32 and x.dtype != torch.bfloat16
        dtype = x.dtype if is_exact else torch.float64
        if are_spikes:
            seen.nonzero.add_(x.sum((0, 1), dtype=dtype))
            return
        signs = x.sign()
        seen.others.add_((x - signs).abs_().sum())
        seen.nonzero.add_(signs.abs_().sum((0, 1), dtype=dtype))

    def take(self) -> dict[str, Counted]:
        """Returns the counts by name, and forgets them."""
        seen, self._seen = self._seen, {}
        if not seen:
            return {}
        rows = [torch.stack([(each.nonzero * each.times_used).sum(), each.others]) for each in seen.values()]
        counts: dict[str, Counted] = {}
        for (name, _), (operations, others) in zip(seen, torch.stack(rows).tolist(), strict=True):
            counts[name] = counts.get(name, Counted(0.0, True)).plus(Counted(operations, others == 0))
        return counts


def add_ranks(of_ranks: Iterable[Mapping[str, Counted]], samples: int) -> list[LayerOperations]:
    """Operations of a sample, from the counts of all ranks over so many samples."""
    sums: dict[str, Counted] = {}
    for of_rank in of_ranks:
        for name, count in of_rank.items():
            sums[name] = sums.get(name, Counted(0.0, True)).plus(count)
    found = []
    for name, count in sums.items():
        each = count.operations / samples
        found.append(LayerOperations(name, *(0.0, each) if count.is_spiking else (each, 0.0)))
    return found


def times_used(product: Callable[[Tensor], Tensor], space: Sequence[int]) -> Tensor:
    """Number of outputs that a value at each pixel goes into, for a product of one channel with weights of 1.

    That is the gradient of the outputs' sum, whatever stride, padding and dilation are.
    """
    with torch.enable_grad():
        x = torch.ones((1, 1, *space), dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(product(x).sum(), x)
    return gradient[0, 0]


def operation_scalars(layers: Sequence[LayerOperations]) -> dict[str, float]:
    """Sums over the layers by scalar name; empty without layers."""
    if not layers:
        return {}
    return {
        "validation/effective_macs": sum(each.effective_macs for each in layers),
        "validation/effective_acs": sum(each.effective_acs for each in layers),
        "validation/energy_mj": sum(each.energy_mj for each in layers),
    }


def describe_operations(layers: Sequence[LayerOperations], multiply_adds: int) -> str:
    """Line of the log, beside the multiply-adds of a forward that skips no zeros."""
    value = operation_scalars(layers)
    return (
        f"a sample's forward: {value['validation/effective_acs']:.4g} effective ACs and "
        f"{value['validation/effective_macs']:.4g} effective MACs, {value['validation/energy_mj']:.4g} mJ in 45 nm; "
        f"without skipping zeros: {multiply_adds:.4g} MACs, {1e3 * multiply_adds * MAC_JOULES:.4g} mJ"
    )
