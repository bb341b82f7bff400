"""Kernels of a device beside plain PyTorch on the CPU: neurons, packing and quotients. `-m gpu` runs them on a GPU.

The reference computes on the CPU: on a GPU torch divides by a number by multiplying with its inverse, which rounds
differently.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megasnn.kernels import NeuronSpec
from megasnn.kernels.backends import AUTO_BACKEND
from megasnn.kernels.neuron import neuron_multi_step
from megasnn.kernels.norm_neuron import BatchNorm, NormNeuron, norm_pool_neuron
from megasnn.kernels.spike_codec import COUNTS, SPIKES, TERNARY, Content, decode_into, encode

GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
CPU = torch.device("cpu")
TYPES = (torch.float64, torch.float32, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2**-7}
TAUS = (1.333, 1.7, 3.0, 1.0000001)


@dataclass(frozen=True)
class Case:
    """A neuron, and the shape `[T, N, C, H, W]` of its input."""

    spec: NeuronSpec
    shape: tuple[int, ...]
    pool: bool = False


def neuron(kind: str, surrogate: str, v_reset: float | None, detach: bool, **options: Any) -> NeuronSpec:
    return NeuronSpec(kind, v_threshold=0.6, v_reset=v_reset, detach_reset=detach, surrogate=surrogate, **options)


# On a CPU each of them is compiled for seconds.
COMPILED = {
    "spikformer": Case(neuron("lif", "sigmoid", 0.0, True), (4, 2, 12, 5, 5), pool=True),
    "vgg": Case(neuron("lif", "atan", 0.0, True, tau=1.333, decay_input=False), (10, 2, 8, 4, 6)),
}
CASES = {
    **COMPILED,
    "if": Case(neuron("if", "sigmoid", 0.0, True), (1, 2, 5, 6, 7)),
    "if-pool": Case(neuron("if", "atan", -0.3, False), (10, 1, 40, 5, 4), pool=True),
    "lif-3": Case(neuron("lif", "sigmoid", -0.3, True, tau=3.0), (4, 1, 33, 3, 5)),
    "lif-16-steps": Case(neuron("lif", "atan", 0.0, False, tau=1.7), (16, 1, 7, 3, 4), pool=True),
    "lif-17-steps": Case(neuron("lif", "sigmoid", None, False, tau=1.7, decay_input=False), (17, 2, 3, 5, 1)),
    "plif": Case(neuron("plif", "sigmoid", None, True), (16, 1, 7, 5, 3)),
    "plif-pool": Case(neuron("plif", "atan", -0.3, False, decay_input=False), (3, 2, 6, 5, 4), pool=True),
}
ON_DEVICES = [
    *(pytest.param("cpu", name, id=f"cpu-{name}") for name in COMPILED),
    *(pytest.param("cuda", name, id=f"gpu-{name}", marks=GPU) for name in CASES),
]
DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="gpu", marks=GPU)]


def backend_of(device: str) -> str:
    return "triton" if device == "cuda" else AUTO_BACKEND


def input_of(case: Case, rounded: torch.dtype, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal values, rounded to one type and passed in another, with channels last in memory."""
    steps, samples, channels, *space = case.shape
    generator = torch.Generator().manual_seed(steps)
    values = 2.5 * torch.randn(steps, samples, *space, channels, generator=generator)
    return values.to(rounded).to(device, dtype).movedim(-1, 2).requires_grad_()


def weights_of(case: Case, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """The learned time constant, if the neuron has one."""
    numbers = torch.float32 if dtype == torch.bfloat16 else dtype
    if case.spec.kind != "plif":
        return []
    return [torch.tensor(-0.3, dtype=numbers, device=device, requires_grad=True)]


def on_cpu(spikes: Tensor, others: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Spikes, other results, and gradients of a function whose factors are exact in every type."""
    order = torch.arange(spikes.numel(), dtype=torch.float64).view(spikes.shape)
    factors = (order * 0.7).sin().bfloat16().to(spikes)
    gradients = torch.autograd.grad(spikes, inputs, factors)
    return [each.detach().cpu() for each in (spikes, *others, *gradients)]


def alone(case: Case, backend: str, rounded: torch.dtype, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    x = input_of(case, rounded, dtype, device)
    learned = weights_of(case, dtype, device)
    spikes, *others = neuron_multi_step(x, case.spec, w=learned[0] if learned else None, backend=backend)
    return on_cpu(spikes, others, [x, *learned])


def behind_a_norm(case: Case, backend: str, device: torch.device) -> list[Tensor]:
    dtype = torch.float64
    x = input_of(case, dtype, dtype, device)
    learned = weights_of(case, dtype, device)
    channels = case.shape[2]
    scale = torch.linspace(0.5, 1.5, channels, dtype=dtype, device=device, requires_grad=True)
    shift = torch.linspace(0.0, 1.0, channels, dtype=dtype, device=device, requires_grad=True)
    norm_neuron = NormNeuron(case.spec, 1e-5, case.pool, case.shape[0])
    w = learned[0] if learned else None
    spikes, *others = norm_pool_neuron(x, BatchNorm(scale, shift), norm_neuron, w, backend=backend)[:3]
    return on_cpu(spikes, others, [x, scale, shift, *learned])


def require_same(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    """The same spikes; all other values within a share of the largest, or of 1."""
    assert torch.equal(found[0].to(wanted[0].dtype), wanted[0]) and 0 < wanted[0].mean() < 1
    for actual, expected in zip(found[1:], wanted[1:], strict=True):
        scale = max(float(expected.abs().max()), 1.0)
        difference = float((actual.double() - expected.double()).abs().max())
        # False for NaN.
        assert difference <= tolerance * scale


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("device", "name"), ON_DEVICES)
def test_neurons(device: str, name: str, dtype: torch.dtype) -> None:
    """In bfloat16 kernels compute in float32, from rounded inputs."""
    case = CASES[name]
    exact = torch.float32 if dtype == torch.bfloat16 else dtype
    wanted = alone(case, "torch", dtype, exact, CPU)
    found = alone(case, backend_of(device), dtype, dtype, torch.device(device))
    require_same(found, wanted, TOLERANCE[dtype])


@pytest.mark.parametrize(("device", "name"), ON_DEVICES)
def test_neurons_behind_a_norm(device: str, name: str) -> None:
    """In float64: sums in another order flip spikes of smaller types at the threshold."""
    wanted = behind_a_norm(CASES[name], "torch", CPU)
    found = behind_a_norm(CASES[name], backend_of(device), torch.device(device))
    require_same(found, wanted, TOLERANCE[torch.float64])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_bispike_has_the_bits_of_the_reference(device: str, dtype: torch.dtype) -> None:
    """Of spikes, potentials and gradients; a step of the second shape does not fill whole bytes."""
    for shape in ((4, 2, 16, 5, 5), (5, 1, 3, 5, 7)):
        case = Case(NeuronSpec("bispike", v_threshold=0.7), shape)
        results = []
        for place, backend in ((CPU, "torch"), (torch.device(device), backend_of(device))):
            x = input_of(case, dtype, dtype, place)
            spikes, v = neuron_multi_step(x, case.spec, backend=backend)
            (gradient,) = torch.autograd.grad(spikes, x, (spikes * 3 + 0.3).detach())
            results.append([each.detach().cpu() for each in (spikes, v, gradient)])
        assert all(map(torch.equal, *results)) and {-1.0, 0.0, 1.0} == set(results[0][0].unique().tolist())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_spikes_and_counts_are_packed_exactly(device: str, dtype: torch.dtype) -> None:
    for size in (1, 2048, 4099):
        generator = torch.Generator().manual_seed(size)
        counts = torch.randint(0, 256, (size,), generator=generator).to(device, dtype)
        spikes = (counts > 127).to(dtype)
        ternary = ((counts > 170).int() - (counts < 85).int()).to(dtype)
        for values, content in ((spikes, SPIKES), (ternary, TERNARY), (counts, COUNTS)):
            require_exact(values, content)


def require_exact(values: Tensor, content: Content) -> None:
    packed = encode(values, content)
    assert torch.equal(packed.cpu(), encode(values.cpu(), content))
    unpacked = torch.empty_like(values)
    decode_into(packed, content, unpacked.view(1, -1))
    assert torch.equal(unpacked, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_quotients_are_rounded_correctly(device: str, dtype: torch.dtype) -> None:
    """After one step a leaky neuron that never fires has the potential x / tau."""
    size = 2**18 if device == "cuda" else 1000
    generator = torch.Generator().manual_seed(0)
    for tau in TAUS:
        x = 100 * torch.randn(1, 1, 1, size, generator=generator, dtype=dtype)
        spec = NeuronSpec("lif", tau=tau, v_threshold=1e6, v_reset=0.0)
        _, potential = neuron_multi_step(x.to(device), spec, backend=backend_of(device))
        divisor = torch.full((), tau, dtype=dtype)
        assert math.isfinite(float(potential.sum()))
        assert torch.equal(potential.cpu(), (x / divisor)[0])
