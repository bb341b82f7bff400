"""The neuron: reference and compiled kernels against SpikingJelly's nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from spikingjelly.activation_based import surrogate
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megasnn.kernels import SURROGATES, NeuronSpec
from megasnn.kernels.neuron import neuron_multi_step
from megasnn.kernels.torch_backend import TorchNeuron
from tests.kernels.models import (
    assert_close,
    channels_last,
    gradients,
    neuron_results,
    plif_weight,
    require_same,
    saved_tensors,
    spikingjelly_neuron,
    spikingjelly_results,
)

CHARGES: dict[str, dict[str, Any]] = {
    "if": {"kind": "if"},
    "lif-2": {"kind": "lif", "tau": 2.0},
    "lif-2-leak": {"kind": "lif", "tau": 2.0, "decay_input": False},
    "lif-3": {"kind": "lif", "tau": 3.0},
    "lif-3-leak": {"kind": "lif", "tau": 3.0, "decay_input": False},
    "plif": {"kind": "plif"},
    "plif-leak": {"kind": "plif", "decay_input": False},
}
# One of each charge, and any two of the others: each is compiled for seconds. A reset to 0.0 has the code of -0.3.
FEW = [(charge, (-0.3, None)[i % 2], i % 3 > 0, ("sigmoid", "atan")[i // 2 % 2]) for i, charge in enumerate(CHARGES)]
BACKENDS = "torch", "fused"
IF = NeuronSpec("if", detach_reset=False)  # which is compiled in any case


@pytest.mark.parametrize(("charge", "v_reset", "detach_reset", "surrogate_name"), FEW)
def test_equals_spikingjelly(charge, v_reset, detach_reset, surrogate_name) -> None:
    numbers = CHARGES[charge]
    spec = NeuronSpec(v_threshold=0.6, v_reset=v_reset, detach_reset=detach_reset, surrogate=surrogate_name, **numbers)
    x = (channels_last(5, 2, 7, 3, 3) * 2.5).requires_grad_()
    w = plif_weight(spec)
    wanted = spikingjelly_results(x, spec, w)
    assert 0.05 < wanted[0].mean() < 0.95
    for backend in BACKENDS:
        require_same(neuron_results(x, spec, backend, w), wanted)


@pytest.mark.parametrize("v_reset", [0.1, None])
def test_first_potential(v_reset) -> None:
    """Given potentials continue a sequence: two halves equal the whole, gradients included."""
    spec = NeuronSpec(tau=3.0, v_reset=v_reset, detach_reset=False, surrogate="atan")
    x = channels_last(6, 2, 5, 4).requires_grad_()
    for backend in BACKENDS:
        first, v = neuron_multi_step(x[:3], spec, backend=backend)
        second, v = neuron_multi_step(x[3:], spec, v, backend=backend)
        halves = torch.cat([first, second])
        require_same([halves, v, *gradients(halves, [x], v)], neuron_results(x, spec, "torch"))


@pytest.mark.parametrize("name", [name for name, entry in SURROGATES.items() if entry.spikingjelly is not None])
def test_every_surrogate(name) -> None:
    """SpikingJelly's surrogates, with its default alpha; those that are not compiled take the reference."""
    spec = NeuronSpec(surrogate=name)
    assert spec.surrogate_alpha == getattr(surrogate, SURROGATES[name][0])().alpha
    x = channels_last(3, 2, 4, 5).requires_grad_()
    require_same(neuron_results(x, spec), spikingjelly_results(x, spec))


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_the_triangular_surrogate_is_that_of_its_paper(alpha) -> None:
    """Equation 4 of arXiv 2202.11946, by finite potentials: height 1 / alpha at the threshold, 0 beyond alpha."""
    spec = NeuronSpec("if", surrogate="triangular", alpha=alpha, v_threshold=1.0)
    x = torch.tensor([[1.0, 1.0 + alpha / 2, 1.0 - alpha / 4, 1.0 + alpha, 1.0 - 2 * alpha]], dtype=torch.float64)
    x.requires_grad_()
    spikes, _ = neuron_multi_step(x, spec)
    assert spikes.tolist() == [[1, 1, 0, 1, 0]]
    spikes.sum().backward()
    assert_close(x.grad, torch.tensor([[1, 0.5, 0.75, 0, 0]], dtype=torch.float64) / alpha)


class Divisions(TorchDispatchMode):
    """What was divided by, and how many tensors were filled with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.divisors: list[Any] = []
        self.filled = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.div:
            self.divisors.append(args[1])
        self.filled += func.overloadpacket is torch.ops.aten.new_full
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("charge", ["lif-3", "lif-3-leak"])
def test_a_gpu_divides_by_a_tensor_that_is_made_once(charge: str) -> None:
    """By a number it multiplies by a reciprocal. The meta device stands for it."""
    x = torch.empty(9, 3, 4, device="meta", requires_grad=True)
    with Divisions() as divided:
        TorchNeuron(x.shape, x.dtype, NeuronSpec(**CHARGES[charge])).multi_step(x, None, None)
    assert len(divided.divisors) == 9 and divided.filled == 1
    assert all(isinstance(each, Tensor) and each.device == x.device for each in divided.divisors)


@pytest.mark.parametrize("factor", [0.125, 0.25])
def test_ties_with_the_threshold(factor) -> None:
    """Attention feeds multiples of 1/8 against threshold 1/2: potentials hit it exactly, and must fire."""
    spec = NeuronSpec(tau=2.0, v_threshold=0.5)
    for dtype in (torch.float32, torch.float64):
        x = (torch.randint(0, 9, (4, 3, 8, 5), generator=torch.Generator().manual_seed(1)) * factor).to(dtype)
        assert torch.equal(neuron_multi_step(x, spec, backend="fused")[0], spikingjelly_neuron(spec)(x))


@pytest.mark.parametrize(
    "view",
    [
        torch.Tensor.contiguous,
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x[..., ::2],
        lambda x: x[:1].expand(4, -1, -1, -1),
    ],
    ids=["row-major", "samples-first", "gaps", "repeated"],
)
def test_any_memory_order(view) -> None:
    x = view(channels_last(4, 3, 5, 6)).detach().requires_grad_()
    require_same(neuron_results(x, IF, "fused"), neuron_results(x, IF, "torch"))


def test_large_potentials_and_nan() -> None:
    """The surrogate's exponential neither overflows nor hides a NaN."""
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([[0.0, 30.0, -30.0, 1e4, -1e4, 1e30, -1e30, float("nan")]], dtype=dtype)
        x.requires_grad_()
        spikes = [neuron_multi_step(x, IF, backend=each)[0] for each in BACKENDS]
        expected, actual = (torch.autograd.grad(each.sum(), x)[0] for each in spikes)
        torch.testing.assert_close(actual, expected, rtol=0, atol=torch.finfo(dtype).eps * 4, equal_nan=True)


def test_sigmoid_gradient_accuracy() -> None:
    """Against double precision (and for double itself against extended precision where the machine has it)."""
    u = torch.linspace(-20, 5, 4001, dtype=torch.float64)
    for dtype, allowed in ((torch.float32, 5e-7), (torch.float64, 3e-15)):
        x = (u.to(dtype) + 1).requires_grad_()
        (actual,) = torch.autograd.grad(neuron_multi_step(x[None], IF, backend="fused")[0].sum(), x)
        z = np.abs(4 * ((x.detach() - 1).numpy().astype(np.longdouble)))
        exact = 4 * np.exp(-z) / (1 + np.exp(-z)) ** 2
        assert np.max(np.abs(actual.numpy() / exact - 1)) < allowed


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["lif", "plif"])
def test_bfloat16_keeps_its_own_size_and_computes_in_float32(kind, backend) -> None:
    """Of the input nothing wider is kept for backward; the potential goes on in float32."""
    spec = NeuronSpec(kind=kind, detach_reset=False)
    w = plif_weight(spec, torch.float32)
    x = (channels_last(4, 2, 7, 3, 3) * 2.5).bfloat16()
    v0 = channels_last(2, 7, 3, 3, seed=2).float()
    whole, leaf = x.float().requires_grad_(), x.clone().requires_grad_()
    expected, last = neuron_multi_step(whole, spec, v0, w, backend)
    with saved_tensors() as saved:
        spikes, v = neuron_multi_step(leaf, spec, v0, w, backend)
    assert (torch.bfloat16, x.numel()) in saved and sum(size for _, size in saved) <= x.numel() + v0.numel() + 1
    learned = [] if w is None else [w]
    wanted = expected.bfloat16(), last, *gradients(expected, [whole, *learned], last)
    found = spikes, v, *gradients(spikes, [leaf, *learned], v)
    assert torch.equal(found[2], wanted[2].bfloat16()) and found[2].any() and v.dtype == torch.float32
    assert spikes.dtype == torch.bfloat16 and all(map(torch.equal, found[:2] + found[3:], wanted[:2] + wanted[3:]))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"spec": NeuronSpec(surrogate="erf"), "backend": "fused"}, "--surrogate erf;"),
        ({"x": torch.zeros(2, 0), "backend": "fused"}, "empty"),
        ({"backend": "triton"}, "--neuron-backend auto or torch"),
        ({"backend": "cupy"}, "--neuron-backend"),
        ({"spec": NeuronSpec(kind="plif")}, "plif"),
        ({"w": torch.zeros(())}, "plif"),
        ({"x": torch.zeros(4, 3, dtype=torch.int64)}, "int64"),
    ],
)
def test_refuses(arguments, named) -> None:
    with pytest.raises(ValueError, match=named):
        neuron_multi_step(**{"x": torch.zeros(4, 3), "spec": NeuronSpec(), **arguments})


@pytest.mark.parametrize(
    ("field", "named"),
    [({"kind": "izhikevich"}, "lif, if, plif"), ({"surrogate": "relu"}, "sigmoid, atan"), ({"tau": 1.0}, "--tau")],
)
def test_spec_refuses(field, named) -> None:
    with pytest.raises(ValueError, match=named):
        NeuronSpec(**field)
