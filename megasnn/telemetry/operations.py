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


class OperationCounter:
    """Counts the operations of this rank's products, without waiting for the device."""

    def __init__(self) -> None:
        self._times_used: dict[tuple[str, torch.Size], Tensor] = {}
        self._counts: dict[str, Tensor] = {}  # operations, and whether an input was no spike

    @torch.no_grad()
    def observe(self, name: str, x: Tensor, times_used: TimesUsed, steps: int = 1, are_spikes: bool = False) -> None:
        """Adds the operations of one product.

        Args:
            x: images `[frames, C, H, W]`, or of other dimensions behind the channels.
            steps: number of time steps that each frame stands for.
            are_spikes: True where the values are known to be 0 or 1.
        """
        if not _is_counting.get():
            return
        space = x.shape[2:]
        if (name, space) not in self._times_used:
            self._times_used[name, space] = times_used(space).to(x.device)
        nonzero = torch.count_nonzero(x, dim=(0, 1))
        operations = steps * (nonzero * self._times_used[name, space]).sum()
        others = torch.zeros_like(operations)
        if not are_spikes:
            others += ((x != 0) & (x.abs() != 1)).any()
        count = torch.stack([operations, others])
        self._counts[name] = self._counts[name] + count if name in self._counts else count

    def take(self) -> dict[str, Counted]:
        """Returns the counts by name, and forgets them."""
        counts, self._counts = self._counts, {}
        if not counts:
            return {}
        rows = torch.stack([*counts.values()]).tolist()
        return {name: Counted(row[0], row[1] == 0) for name, row in zip(counts, rows, strict=True)}


def add_ranks(of_ranks: Iterable[Mapping[str, Counted]], samples: int) -> list[LayerOperations]:
    """Operations of a sample, from the counts of all ranks over so many samples."""
    sums: dict[str, Counted] = {}
    for of_rank in of_ranks:
        for name, count in of_rank.items():
            before = sums.get(name, Counted(0.0, True))
            operations = before.operations + count.operations
            sums[name] = Counted(operations, before.is_spiking and count.is_spiking)
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
