"""Errors against float64 and times of a layer's products, as they are and split: which of them are worth splitting."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from megasnn.kernels.products import KINDS, ConvolutionProducts, Kind, LayerShape, ProductChoice, Products

ALLOWED_ERROR = 1.5
"""How many times as large the errors of a split product may be."""
FIRING = 0.2  # share of spikes in the input
RUNS = 5


@dataclass(frozen=True)
class Measured:
    """
    Attributes:
        largest, mean: difference from float64, in mean sizes of a result.
        seconds: of one product.
    """

    largest: float
    mean: float
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """One product of a layer, as it is, split, and split in one pass where there is a kernel that does so."""

    plain: Measured
    split: Measured
    at_once: Measured | None = None

    @property
    def best(self) -> Measured:
        """The fastest of those that are exact enough."""
        found = self.plain
        for each in (self.split, self.at_once):
            if each is not None and self._is_exact_enough(each) and each.seconds < found.seconds:
                found = each
        return found

    def _is_exact_enough(self, split: Measured) -> bool:
        limits = ALLOWED_ERROR * self.plain.largest, ALLOWED_ERROR * self.plain.mean
        return split.largest <= limits[0] and split.mean <= limits[1]


Comparisons = Mapping[tuple[LayerShape, Kind], Comparison]


def compare(shape: LayerShape, kind: Kind, samples: int, device: torch.device) -> Comparison:
    """Measures on random operands. Where the device's memory is too small for that, with fewer samples."""
    while True:
        try:
            return _compare(shape, kind, samples, device)
        except torch.OutOfMemoryError:
            if samples == 1:
                raise
            samples //= 2


def _compare(shape: LayerShape, kind: Kind, samples: int, device: torch.device) -> Comparison:
    x, weight, grad = _operands(shape, samples, device)
    exact = _run(shape.products, kind, x.double(), weight.double(), grad.double())
    size = exact.abs().mean()

    def measured(products: Products) -> Measured:
        error = (_run(products, kind, x, weight, grad).double() - exact).abs_()
        largest, mean = float(error.max() / size), float(error.mean() / size)
        return Measured(largest, mean, _seconds(lambda: _run(products, kind, x, weight, grad), device))

    split = replace(shape.products, split=frozenset(KINDS))
    at_once = shape.products.can_at_once(kind, x if kind == "output" else grad, weight)
    return Comparison(
        measured(shape.products),
        measured(split),
        measured(replace(split, at_once=frozenset(KINDS))) if at_once else None,
    )


def _operands(shape: LayerShape, samples: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and gradient of the output."""
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(shape.weight, generator=generator, device=device) / shape.weight[1:].numel() ** 0.5
    rows, images = shape.frames * samples, isinstance(shape.products, ConvolutionProducts)
    groups = shape.products.geometry.groups if isinstance(shape.products, ConvolutionProducts) else 1
    size = (rows, shape.weight[1] * groups, *shape.space)
    order = torch.channels_last if images else torch.contiguous_format
    x = (torch.rand(size, generator=generator, device=device) < FIRING).float()
    of_output = shape.products.output(torch.empty(size, device="meta"), torch.empty(shape.weight, device="meta")).shape
    grad = torch.randn(of_output, generator=generator, device=device)
    return x.contiguous(memory_format=order), weight, grad.contiguous(memory_format=order)


def _run(products: Products, kind: Kind, x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    if kind == "output":
        return products.output(x, weight)
    if kind == "input gradient":
        return products.input_gradient(grad, weight, x.shape[2:])
    total = torch.zeros_like(weight)
    products.add_weight_gradient(total, grad, x)
    return total


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median time of a few runs, after one to warm up."""
    times = []
    for _ in range(1 + RUNS):
        _wait(device)
        begin = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - begin)
    return median(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def chosen(comparisons: Comparisons) -> ProductChoice:
    """Splits what is worth it, and tells so."""
    of_shape: dict[LayerShape, Products] = {}
    for (shape, kind), comparison in comparisons.items():
        taken, best = of_shape.get(shape, shape.products), comparison.best
        if best is not comparison.plain:
            taken = replace(taken, split=taken.split | {kind})
        if best is comparison.at_once:
            taken = replace(taken, at_once=taken.at_once | {kind})
        of_shape[shape] = taken
    return ProductChoice(of_shape=of_shape, told=tuple(_told(kind, comparisons) for kind in KINDS))


def _told(kind: Kind, comparisons: Comparisons) -> str:
    of_kind = [each for (_, its_kind), each in comparisons.items() if its_kind == kind]
    split = [each for each in of_kind if each.best is not each.plain]
    told = f"fp32 products: the {kind} is split for tensor cores in {len(split)} of {len(of_kind)} shapes of layers"
    if not split:
        return told
    at_once = sum(each.best is each.at_once for each in split)
    told += f" (in {at_once} of them by a kernel of its own)" if at_once else ""
    gains = [each.plain.seconds / each.best.seconds for each in split]
    worst = max(each.best.mean / each.plain.mean if each.plain.mean else 0.0 for each in split)
    return (
        f"{told}, {min(gains):.1f} to {max(gains):.1f} times as fast, with at most {worst:.2f} times IEEE's mean error"
    )
