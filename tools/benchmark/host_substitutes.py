"""Substitutes that only make outputs of the right shape: for Triton's kernels, for products and for convolutions.

Products and convolutions are replaced in torch's dispatcher, behind autograd. So every way of calling them meets the
substitute, their gradients too. Ranks exchange over torch's "fake" transport, which is done at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tools.benchmark.host_marks import Meter

CONVOLUTIONS = ("convolution", "convolution_backward")
# Others that compute a product; one that a step needs gets a function in _FUNCTIONS.
REFUSED = ("mv", "addmv", "dot", "addbmm", "mm.dtype", "addmm.out", "baddbmm.out", "addmv.out", "dot.out")


def launch(meter: Meter) -> Callable[..., None]:
    """Replaces the start of a Triton kernel; the outputs keep their memory's content."""

    def launch(*args: Any, **constants: Any) -> None:
        meter.pause()
        meter.substituted["launches"] += 1
        meter.enter(meter.label)

    return launch


def _product(a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype)


def _product_out(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    return out


def _added_product(total: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _product(a, b)


def _added_product_(total: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return total


def _convolution(
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    along = zip(images.shape[2:], weight.shape[2:], stride, padding, dilation, output_padding, strict=True)
    if transposed:
        channels = weight.shape[1] * groups
        space = [(n - 1) * step - 2 * pad + far * (k - 1) + 1 + more for n, k, step, pad, far, more in along]
    else:
        channels = weight.shape[0]
        space = [(n + 2 * pad - far * (k - 1) - 1) // step + 1 for n, k, step, pad, far, _ in along]
    shape = (len(images), channels, *space)
    return torch.empty(shape, dtype=images.dtype, memory_format=torch.channels_last)


def _convolution_backward(
    grad: Tensor, images: Tensor, weight: Tensor, bias_sizes: Any, *options: Any
) -> tuple[Tensor | None, ...]:
    wanted = options[-1]
    found = [torch.empty_like(x) if is_wanted else None for x, is_wanted in zip((images, weight), wanted, strict=False)]
    return *found, grad.new_empty(grad.shape[1]) if wanted[2] else None


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("mm", "bmm", "bmm.dtype"), _product),
    **dict.fromkeys(("mm.out", "bmm.out"), _product_out),
    **dict.fromkeys(("addmm", "baddbmm"), _added_product),
    "addmm_": _added_product_,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
}


def _measured(function: Callable[..., Any], kind: str, meter: Meter) -> Callable[..., Any]:
    def measured(*args: Any, **options: Any) -> Any:
        meter.pause()
        meter.substituted[kind] += 1
        result = function(*args, **options)
        meter.enter(meter.label)
        return result

    return measured


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **options: Any) -> Any:
        raise RuntimeError(f"aten::{name} has no substitute: add one to tools/benchmark/host_substitutes.py")

    return refuse


@contextmanager
def without_computing(meter: Meter) -> Iterator[None]:
    """Inside, products and convolutions compute nothing.

    A product without a substitute, and the start of a Triton kernel, raise RuntimeError.
    """
    library = torch.library.Library("aten", "IMPL")  # what it replaces is back once it is gone
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns of every kernel that is replaced
        for name, function in _FUNCTIONS.items():
            kind = "convolutions" if name in CONVOLUTIONS else "products"
            library.impl(name, _measured(function, kind, meter), "CPU")
        for name in REFUSED:
            library.impl(name, _refusing(name), "CPU")
    with mock.patch("triton.runtime.jit.JITFunction.run", _refuse_kernel), _zeros_read():
        yield


def _refuse_kernel(kernel: Any, *args: Any, **options: Any) -> None:
    raise RuntimeError(
        f"Triton kernel {kernel.fn.__name__} was started past the substitute of LAUNCH in tools/benchmark/host_places"
    )


@contextmanager
def _zeros_read() -> Iterator[None]:
    """Inside, the host reads zeros from floating-point tensors, since uninitialised values may be NaN."""
    read = Tensor.tolist

    def tolist(x: Tensor) -> Any:
        return read(torch.zeros_like(x) if x.is_floating_point() else x)

    with mock.patch.object(Tensor, "tolist", tolist):
        yield


def join_fake_ranks(ranks: int) -> None:
    """Makes a world with torch's "fake" transport: this process is the first rank, and the others do not exist.

    One process repeats its processor time better than real ranks, whose Gloo threads and polling would be counted.
    A GPU's host has neither: NCCL's work is the device's.
    """
    import_module("torch.testing._internal.distributed.fake_pg")  # registers it
    dist.init_process_group("fake", rank=0, world_size=ranks, store=dist.HashStore())
