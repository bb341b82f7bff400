"""The check of a GPU, kernels: their errors against the reference, and their speed beside that of a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import inf, isnan
from statistics import median

import torch
from torch import Tensor

from megasnn.kernels import NeuronSpec
from megasnn.kernels.codec import pack_bits, pack_counts, unpack_bits, unpack_counts
from megasnn.kernels.fused_constants import FUSED_CHARGES, FUSED_SURROGATES
from megasnn.kernels.norm_neuron import Norm, Unit
from megasnn.kernels.philox import Runs, kept_by_tensors
from megasnn.kernels.unit import neuron_multi_step, norm_pool_neuron
from tools.benchmark.gpu import Figure, Setting
from tools.benchmark.harness import seconds

ROUNDS, REPEATS = 5, 10
FORWARD, BACKWARD = 0.8, 0.7  # of a copy's bytes a second
TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-6}


def errors(setting: Setting) -> Iterator[Figure]:
    """Every neuron, reset and surrogate that the kernels know, alone and behind a norm with pooling."""
    flipped, worst = 0, dict.fromkeys(TOLERANCE, 0.0)
    resets = [0.0, None] if setting.is_tiny else [0.0, -0.3, None]
    for kind, surrogate, v_reset, dtype in product(FUSED_CHARGES, FUSED_SURROGATES, resets, TOLERANCE):
        spec = NeuronSpec(kind=kind, surrogate=surrogate, v_reset=v_reset, v_threshold=0.6)
        x = _normal(setting, 3, 2, 5, 6, 7, dtype=dtype) * 2.5
        w = torch.tensor(-0.3, dtype=dtype, device=setting.device, requires_grad=True) if kind == "plif" else None
        for compute in (_alone, _behind_a_norm) if dtype == torch.float64 else (_alone,):
            (spikes, *wanted), (found_spikes, *found) = (compute(name, x, spec, w) for name in ("torch", "triton"))
            flipped += int((spikes != found_spikes).sum())
            for actual, expected in zip(found, wanted, strict=True):
                worst[dtype] = max(worst[dtype], error_of(actual, expected))
    yield Figure("spikes that differ from the reference", flipped, most=0)
    for dtype, value in worst.items():
        name = str(dtype).removeprefix("torch.")
        yield Figure(f"largest error of potentials and gradients, {name}", value, most=TOLERANCE[dtype])
    yield Figure("bits and bytes that are not exact", _inexact(setting), most=0)
    yield Figure("random choices that differ", _differently_kept(setting), most=0)


def error_of(actual: Tensor, expected: Tensor) -> float:
    """The largest difference as a part of the largest value; infinite where one of them is nan, which no bound sees."""
    error = float((actual - expected).abs().max() / expected.abs().max().clamp(min=1))
    return inf if isnan(error) else error


def _alone(backend: str, x: Tensor, spec: NeuronSpec, w: Tensor | None) -> list[Tensor]:
    x = x.detach().requires_grad_()
    spikes, v = neuron_multi_step(x, spec, w=w, backend=backend)
    return [spikes, v.detach(), *_gradients(spikes, [x] if w is None else [x, w])]


def _behind_a_norm(backend: str, x: Tensor, spec: NeuronSpec, w: Tensor | None) -> list[Tensor]:
    x, weight = x.detach().requires_grad_(), torch.linspace(0.5, 2, x.shape[2]).to(x).requires_grad_()
    bias = torch.linspace(0, 1, x.shape[2]).to(x).requires_grad_()
    spikes, mean, variance, _ = norm_pool_neuron(
        x, weight, bias, spec=spec, training=True, w=w, pool=True, backend=backend
    )
    return [spikes, mean, variance, *_gradients(spikes, [x, weight, bias] if w is None else [x, weight, bias, w])]


def _gradients(spikes: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    order = torch.arange(spikes.numel(), device=spikes.device, dtype=spikes.dtype).view(spikes.shape)
    return torch.autograd.grad((spikes * (order * 0.7).sin()).sum(), inputs)


def _inexact(setting: Setting) -> int:
    generator = torch.Generator().manual_seed(0)
    wrong = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        counts = torch.randint(0, 256, (4099,), generator=generator).to(setting.device, dtype)
        spikes = (counts > 127).to(dtype)
        wrong += int((unpack_bits(pack_bits(spikes), spikes.shape, dtype=dtype) != spikes).sum())
        wrong += int((unpack_counts(pack_counts(counts), counts.shape, dtype=dtype) != counts).sum())
    return wrong


def _differently_kept(setting: Setting) -> int:
    from megasnn.kernels.triton.philox import kept_by_kernel

    keys, cut = torch.tensor([[1, 3], [2, 4]]), Runs(3, 1001, 5, 777)
    ours = kept_by_kernel(1 << 22, keys.to(setting.device), 2, cut)
    reference = kept_by_tensors(1 << 22, keys, 2, cut)
    return int((ours.cpu() != reference).sum())


def speeds(setting: Setting) -> Iterator[Figure]:
    """The four calls of a unit, and packing, in bytes a second against those of a copy."""
    for dtype in (torch.bfloat16, torch.float32):
        yield from _speeds_of(setting, dtype)


def _speeds_of(setting: Setting, dtype: torch.dtype) -> Iterator[Figure]:
    from megasnn.kernels.triton import calls

    shape = (2, 2, 8, 4, 4) if setting.is_tiny else (4, 64, 128, 56, 56)
    name = str(dtype).removeprefix("torch.")
    x, g, target = (_normal(setting, *shape, dtype=dtype) for _ in range(3))
    size, bits = x.nbytes, x.numel() // 8
    copy = _rate(setting, lambda: target.copy_(x), 2 * size)
    yield Figure(f"copy, {name}", copy / 1e9, "GB/s", note="x".join(map(str, shape)))
    unit = Unit(NeuronSpec(), 1e-5, False, shape[0])
    ones = torch.ones(shape[2], device=setting.device)
    norm = Norm(ones.double() * 0, ones.double(), ones, ones)
    sums, carried = calls.backward_sums(x, g, norm, None, unit, False)
    count, packed = x.numel() // shape[2], pack_bits(x)

    def input_gradient() -> Tensor:
        return calls.input_gradient(x, g, norm, None, unit, sums, count, carried)

    work: list[tuple[str, Callable[[], object], int, float | None]] = [
        ("statistics", lambda: calls.statistics(x), size, FORWARD),
        ("normalise, charge, fire", lambda: calls.fire(x, norm, None, unit, True), 2 * size + bits, FORWARD),
        ("sums of backward", lambda: calls.backward_sums(x, g, norm, None, unit, False), 2 * size, BACKWARD),
        ("gradient of the input", input_gradient, 3 * size, BACKWARD),
        ("packing of bits", lambda: pack_bits(x), size + bits, None),
        ("unpacking of bits", lambda: unpack_bits(packed, x.shape, dtype=dtype), size + bits, None),
    ]
    for what, run, moved, least in work:
        rate = _rate(setting, run, moved)
        target_share = least if setting.has_targets else None
        yield Figure(f"{what}, {name}", rate / copy, "x a copy", target_share, note=f"{rate / 1e9:.0f} GB/s")


def _rate(setting: Setting, run: Callable[[], object], moved: int) -> float:
    """Bytes a second: the median of some rounds of some calls, after one to warm up."""

    def repeated() -> None:
        for _ in range(1 if setting.is_tiny else REPEATS):
            run()
        setting.wait()

    repeated()
    return moved * (1 if setting.is_tiny else REPEATS) / median(seconds(repeated) for _ in range(ROUNDS))


def _normal(setting: Setting, *shape: int, dtype: torch.dtype) -> Tensor:
    """`[T, N, C, H, W]` with the channels last in memory; the same values each time."""
    time, samples, channels, *space = shape
    generator = torch.Generator(setting.device).manual_seed(0)
    values = torch.randn(
        time, samples, *space, channels, generator=generator, device=setting.device, dtype=torch.float32
    )
    return values.to(dtype).movedim(-1, 2)
