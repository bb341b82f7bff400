"""Synaptic operations and their energy, by NeuroBench 2.3.0 (Yik et al. 2025, arXiv 2304.04640).

Each nonzero input of a weighted product counts once for every output it reaches. Padding, biases and products between
activations (attention) count nothing. A product has accumulations (ACs) if all its inputs in an evaluation are 0, 1 or
-1, otherwise multiply-adds (MACs).

Energies: float32 arithmetic in 45 nm (Horowitz, ISSCC 2014), on hardware that skips zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

MAC_JOULES = 4.6e-12
AC_JOULES = 0.9e-12
LARGEST_EXACT_FLOAT32 = 1 << 24  # float32 holds every whole number up to here

TimesUsed = Callable[[Sequence[int]], Tensor]
"""Maps image height and width to `[H, W]`: number of outputs that each pixel reaches."""

_is_counting: ContextVar[bool] = ContextVar("is_counting", default=True)


class OperationCount(NamedTuple):
    """Operations over all samples. is_spiking: all inputs were 0, 1 or -1."""

    operations: float
    is_spiking: bool


class LayerOperations(NamedTuple):
    """A convolution's or linear layer's, per sample."""

    name: str
    effective_macs: float
    effective_acs: float

    @property
    def energy_mj(self) -> float:
        return 1e3 * (self.effective_macs * MAC_JOULES + self.effective_acs * AC_JOULES)


@contextmanager
def not_counting() -> Iterator[None]:
    """Stops counting, for forwards on placeholder samples."""
    token = _is_counting.set(False)
    try:
        yield
    finally:
        _is_counting.reset(token)


class _InputCounts(NamedTuple):
    """One product's counts at one image size, on the device."""

    nonzero: Tensor  # [H, W], nonzero values
    others: Tensor  # above 0 once a value was not 0, 1 or -1
    times_used: Tensor  # [H, W], outputs that each pixel reaches in all its time steps


class OperationCounter:
    """Counts operations on this rank, without waiting for the device."""

    def __init__(self) -> None:
        self._inputs: dict[tuple[str, torch.Size], _InputCounts] = {}

    @torch.no_grad()
    def observe(self, name: str, x: Tensor, times_used: TimesUsed, steps: int = 1, are_spikes: bool = False) -> None:
        """Adds one call.

        Args:
            x: inputs `[frames, C, H, W]`, or with other dimensions after the channels.
            steps: time steps that each frame stands for, the same in every call.
            are_spikes: all values are known to be 0 or 1.
        """
        if not _is_counting.get():
            return
        space = x.shape[2:]
        if (name, space) not in self._inputs:
            used = steps * times_used(space).to(x.device)
            self._inputs[name, space] = _InputCounts(torch.zeros_like(used), used.new_zeros(()), used)
        counts = self._inputs[name, space]
        # Sums of ones take a tenth of the time of torch.count_nonzero on a CPU.
        is_exact = x.shape[0] * x.shape[1] <= LARGEST_EXACT_FLOAT32 and x.dtype != torch.bfloat16
        # bfloat16 counts exactly up to 256 only.
        dtype = x.dtype if is_exact else torch.float64
        if are_spikes:
            counts.nonzero.add_(x.sum((0, 1), dtype=dtype))
            return
        signs = x.sign()
        counts.others.add_((x - signs).abs_().sum())
        counts.nonzero.add_(signs.abs_().sum((0, 1), dtype=dtype))

    def take(self) -> dict[str, OperationCount]:
        """Returns and resets the counts. Waits for the device once."""
        inputs = self._inputs
        self._inputs = {}
        if not inputs:
            return {}
        rows = [torch.stack([(each.nonzero * each.times_used).sum(), each.others]) for each in inputs.values()]
        sums: dict[str, OperationCount] = {}
        # One transfer for all layers: each would wait for the device.
        for (name, _), (operations, others) in zip(inputs, torch.stack(rows).tolist(), strict=True):
            _add(sums, name, OperationCount(operations, others == 0))
        return sums


def _add(sums: dict[str, OperationCount], name: str, count: OperationCount) -> None:
    known = sums.get(name, OperationCount(0.0, True))
    operations = known.operations + count.operations
    # NeuroBench decides for each call, so its energy depends on the batch size (findings/neurobench_batch_size.sh). The
    # whole evaluation decides here, on any layout.
    is_spiking = known.is_spiking and count.is_spiking
    sums[name] = OperationCount(operations, is_spiking)


def add_ranks(rank_counts: Iterable[Mapping[str, OperationCount]], samples: int) -> list[LayerOperations]:
    """Operations per sample. rank_counts: by rank, over all `samples`."""
    sums: dict[str, OperationCount] = {}
    for counts in rank_counts:
        for name, count in counts.items():
            _add(sums, name, count)
    layers = []
    for name, count in sums.items():
        operations = count.operations / samples
        if count.is_spiking:
            layers.append(LayerOperations(name, effective_macs=0.0, effective_acs=operations))
        else:
            layers.append(LayerOperations(name, effective_macs=operations, effective_acs=0.0))
    return layers


def times_used(product: Callable[[Tensor], Tensor], space: Sequence[int]) -> Tensor:
    """`[H, W]`: outputs that each pixel reaches in a one-channel product with weights of 1."""
    # The gradient of the outputs' sum is this number, for any stride, padding and dilation.
    with torch.enable_grad():
        x = torch.ones((1, 1, *space), dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(product(x).sum(), x)
    return gradient[0, 0]


def operation_scalars(layers: Sequence[LayerOperations]) -> dict[str, float]:
    """Sums over all layers by TensorBoard name; empty without layers."""
    if not layers:
        return {}
    macs = acs = energy = 0.0
    for layer in layers:
        macs += layer.effective_macs
        acs += layer.effective_acs
        energy += layer.energy_mj
    return {
        "validation/effective_macs": macs,
        "validation/effective_acs": acs,
        "validation/energy_mj": energy,
    }


def describe_operations(layers: Sequence[LayerOperations], multiply_adds: int) -> str:
    """The log line. multiply_adds: per sample, zeros included."""
    sums = operation_scalars(layers)
    dense_mj = 1e3 * multiply_adds * MAC_JOULES
    return (
        f"a sample's forward: {sums['validation/effective_acs']:.4g} effective ACs and "
        f"{sums['validation/effective_macs']:.4g} effective MACs, {sums['validation/energy_mj']:.4g} mJ in 45 nm; "
        f"without skipping zeros: {multiply_adds:.4g} MACs, {dense_mj:.4g} mJ"
    )
