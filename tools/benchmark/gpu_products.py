"""The check of a GPU, what surrounds the neurons: packed spikes and counts, dropout, average pooling, attention, and
products of fp32 that are split for tensor cores."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megasnn.kernels.codec import pack_bits, pack_counts, unpack_bits, unpack_counts
from megasnn.kernels.compared_products import ALLOWED_ERROR, Measured, compare
from megasnn.kernels.convolution import Geometry
from megasnn.kernels.philox import kept
from megasnn.kernels.pooling import average_pool, average_pool_of_bits
from megasnn.kernels.products import KINDS, ConvolutionProducts, LayerShape, MatrixProducts
from megasnn.kernels.tensor_cores import let_products_round
from megasnn.layers.attend import EXACT_BFLOAT16, Attend, AttendPlan
from megasnn.random import philox_key
from tools.benchmark.gpu import Figure, Setting
from tools.benchmark.gpu_kernels import differing, error_of

REDUCED = (torch.float32, torch.bfloat16, torch.float64)
HEADS, WIDTH, FRAMES = 2, 16, 3
UNFIT = (-0.0, 0.5, -1.0, 256.0, math.nan)  # none is a spike or a count


def exactness(setting: Setting, case: str = "") -> Iterator[Figure]:
    """What must be equal to the last bit, and the errors of products."""
    let_products_round(False)  # what cuDNN does by itself
    yield Figure("bits and bytes that are not exact", _inexact(setting), most=0)
    yield Figure("values that no format holds, and that were taken", _taken(setting), most=0)
    yield Figure("random choices of dropout that differ", _differently_kept(setting), most=0)
    yield Figure("averages of packed spikes that differ", _differently_pooled(setting), most=0)
    yield Figure("outputs of attention that differ", _differently_attended(setting), most=0)
    yield _gradients_of_attention(setting)
    yield from _split(setting)


def _numbers(most: int, *shape: int) -> Tensor:
    """Whole numbers from 0 on, on the CPU."""
    return torch.randint(0, most + 1, shape, generator=torch.Generator().manual_seed(sum(shape)))


def _inexact(setting: Setting) -> int:
    wrong = 0
    for dtype, size in ((dtype, size) for dtype in REDUCED for size in (1, 2048, 4099)):
        counts = _numbers(255, size).to(setting.device, dtype)
        spikes = (counts > 127).to(dtype)
        bits, octets = pack_bits(spikes), pack_counts(counts)
        wrong += differing(bits.cpu(), pack_bits(spikes.cpu())) + differing(octets.cpu(), pack_counts(counts.cpu()))
        wrong += differing(unpack_bits(bits, spikes.shape, dtype=dtype), spikes)
        wrong += differing(unpack_counts(octets, counts.shape, dtype=dtype), counts)
    return wrong


def _taken(setting: Setting) -> int:
    """With the check that a boundary between stages has."""
    taken = 0
    for pack, value in ((pack, value) for pack in (pack_bits, pack_counts) for value in UNFIT):
        values = torch.zeros(4099, device=setting.device)
        pack(values, check=True)
        values[2050] = value
        try:
            pack(values, check=True)
            taken += 1
        except ValueError:
            pass
    return taken


def _differently_kept(setting: Setting) -> int:
    """Of all channels, which are one run of values, and of some, which are a run for each pixel."""
    keys = torch.tensor([philox_key("check", sample) for sample in range(3)]).t().contiguous()
    different = 0
    for channels in (range(37), range(5, 23)):
        ours, reference = (kept(0.25, each, 3, 11, channels, 37, 2**29) for each in (keys.to(setting.device), keys))
        different += differing(ours.cpu(), reference)
    return different


def _differently_pooled(setting: Setting) -> int:
    """Nothing on a CPU, which has no kernel for it."""
    different = 0
    for window, dtype in ((2, torch.bfloat16), (3, torch.float32), (3, torch.float64)):
        images = _numbers(1, 2, 7, 6, 16).to(dtype).movedim(-1, 1)
        found = average_pool_of_bits(pack_bits(images).to(setting.device), images.shape, window, dtype)
        if found is None and setting.is_gpu:
            raise RuntimeError("no kernel pools packed spikes here")
        different += 0 if found is None else differing(found.cpu(), average_pool(images, window))
    return different


def _attention_rows(tokens: int, dtype: torch.dtype) -> Tensor:
    return _numbers(1, FRAMES * tokens, 3 * HEADS * WIDTH).to(dtype)


def _differently_attended(setting: Setting) -> int:
    """Against the CPU; with as many tokens as bfloat16 can sum exactly, and one more."""
    plan, different = AttendPlan(FRAMES, HEADS), 0
    for tokens, dtype in ((n, dtype) for n in (49, EXACT_BFLOAT16, EXACT_BFLOAT16 + 1) for dtype in REDUCED):
        rows = _attention_rows(tokens, dtype)
        found = Attend.apply(rows.to(setting.device), None, plan)
        different += differing(found.cpu(), Attend.apply(rows, None, plan))
    return different


def _gradients_of_attention(setting: Setting) -> Figure:
    """In float32 against float64, beside the CPU's in float32."""

    def gradient(dtype: torch.dtype, device: torch.device | None) -> Tensor:
        rows = _attention_rows(196, dtype).to(device).requires_grad_()
        weights = torch.randn(FRAMES * 196, HEADS * WIDTH, generator=torch.Generator().manual_seed(1))
        out = Attend.apply(rows, None, AttendPlan(FRAMES, HEADS))
        return torch.autograd.grad(out, rows, weights.to(out))[0].cpu()

    exact = gradient(torch.float64, None)
    plain, ours = (error_of(gradient(torch.float32, each), exact) for each in (None, setting.device))
    note = f"{ours:.2g}, on the CPU {plain:.2g}"
    return Figure("attention: error of float32's gradients, x the CPU's", ours / plain, most=ALLOWED_ERROR, note=note)


def _shapes(setting: Setting) -> dict[str, LayerShape]:
    """Layers of both models: long and short sums, with strides, and a product of matrices."""
    wide = 64 if setting.is_tiny else 256
    one = ConvolutionProducts(exact=True)
    three = ConvolutionProducts(exact=True, geometry=Geometry(padding=(1, 1)))
    two = ConvolutionProducts(exact=True, geometry=Geometry((2, 2), (1, 1)))
    return {
        "3 x 3": LayerShape(three, torch.Size((wide, wide, 3, 3)), 4, torch.Size((12, 12))),
        "3 x 3, stride 2": LayerShape(two, torch.Size((wide, wide // 2, 3, 3)), 4, torch.Size((13, 11))),
        "few channels": LayerShape(three, torch.Size((24, 12, 3, 3)), 4, torch.Size((17, 15))),
        "1 x 1": LayerShape(one, torch.Size((4 * wide, wide, 1, 1)), 4, torch.Size((14, 14))),
        "rows": LayerShape(MatrixProducts(exact=True), torch.Size((3 * wide, wide)), 4 * 49, torch.Size(())),
    }


def _split(setting: Setting) -> Iterator[Figure]:
    """Errors against float64 of products in pieces, beside those of IEEE, largest and mean."""
    worst: dict[str, tuple[float, str]] = {}
    for name, shape in _shapes(setting).items():
        for kind in KINDS:
            found = compare(shape, kind, 2, setting.device)
            for way, measured in (("split", found.split), ("split in one pass", found.at_once)):
                if measured is not None:
                    error = _times_as_large(measured, found.plain)
                    worst[way] = max(worst.get(way, (0.0, "")), (error, f"{kind}, {name}"))
    for way, (error, where) in worst.items():
        yield Figure(f"fp32 {way}: error, x IEEE's", error, most=ALLOWED_ERROR, note=f"largest and mean; {where}")


def _times_as_large(split: Measured, plain: Measured) -> float:
    pairs = ((split.largest, plain.largest), (split.mean, plain.mean))
    ratios = [ours / theirs if theirs else (math.inf if ours else 0.0) for ours, theirs in pairs]
    return math.inf if any(map(math.isnan, ratios)) else max(ratios)
