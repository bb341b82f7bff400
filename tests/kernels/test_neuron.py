"""The neuron: reference and fused kernels against SpikingJelly's nodes."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from spikingjelly.activation_based import surrogate
from torch.utils._python_dispatch import TorchDispatchMode

from megasnn.kernels import SURROGATES, NeuronSpec, reference
from megasnn.kernels.backends import backend_told
from megasnn.kernels.spec import _divisor
from megasnn.kernels.unit import neuron_multi_step
from tests.kernels.models import assert_close, channels_last, plif_weight, spikingjelly_neuron
from tests.pairwise import pairwise

CHARGES: dict[str, dict[str, Any]] = {
    "if": {"kind": "if"},
    "lif-2": {"kind": "lif", "tau": 2.0},
    "lif-2-leak": {"kind": "lif", "tau": 2.0, "decay_input": False},
    "lif-3": {"kind": "lif", "tau": 3.0},
    "lif-3-leak": {"kind": "lif", "tau": 3.0, "decay_input": False},
    "plif": {"kind": "plif"},
    "plif-leak": {"kind": "plif", "decay_input": False},
}


def gradients(spikes, v, inputs):
    """Of a fixed function of spikes and last potential."""
    weights = channels_last(*spikes.shape, seed=7)
    return torch.autograd.grad((spikes * weights).sum() + (v * weights[0]).sum(), inputs)


NEURONS = list(product(CHARGES, (0.0, -0.3, None), (True, False), ("sigmoid", "atan")))
FEW = pairwise([case for case in NEURONS if case[1] != 0.0])  # 0.0, the default, has the machine code of -0.3


class _Divisions(TorchDispatchMode):
    """What was divided by, of tensors that were divided; and how many tensors were filled with a number."""

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
def test_a_gpu_divides_by_a_tensor(charge: str) -> None:
    """On the device of what it divides, as which another one stands here: by a number it multiplies by a reciprocal."""
    x = torch.empty(2, 3, 4, device="meta", requires_grad=True)
    with _Divisions() as divided:
        spikes, _ = reference.neuron_multi_step(x, NeuronSpec(**CHARGES[charge]), None, None)
        spikes.sum().backward()
    assert len(divided.divisors) >= 3
    assert all(isinstance(each, torch.Tensor) and each.device == x.device for each in divided.divisors)


def test_dividing_by_a_tensor_changes_no_bit_on_a_cpu() -> None:
    x = channels_last(4096, 3, 7, dtype=torch.float32)
    three, four = (_divisor(x, NeuronSpec(tau=tau)) for tau in (3.0, 4.0))
    assert torch.equal(x / three, x / 3.0) and torch.equal(x / four, x / 4.0)
    assert not torch.equal(x / three, x * (1 / torch.tensor(3.0)))  # what a GPU would make of the number


@pytest.mark.parametrize(("charge", "made"), [("lif-3", 1), ("lif-3-leak", 1), ("lif-2", 0)])
def test_what_is_divided_by_is_made_once_for_all_steps(charge: str, made: int) -> None:
    x = torch.empty(9, 3, 4, device="meta", requires_grad=True)
    with _Divisions() as divided:
        reference.neuron_multi_step(x, NeuronSpec(**CHARGES[charge]), None, None)
    assert len(divided.divisors) == 9 and divided.filled == made


@pytest.mark.parametrize(
    ("charge", "v_reset", "detach_reset", "surrogate_name"),
    [pytest.param(*case, marks=() if case in FEW else pytest.mark.matrix) for case in NEURONS],
)
def test_equals_spikingjelly(charge, v_reset, detach_reset, surrogate_name):
    numbers = CHARGES[charge]
    spec = NeuronSpec(v_threshold=0.6, v_reset=v_reset, detach_reset=detach_reset, surrogate=surrogate_name, **numbers)
    x = (channels_last(5, 2, 7, 3, 3) * 2.5).requires_grad_()
    w = plif_weight(spec)
    node = spikingjelly_neuron(spec, w)
    expected = node(x)
    expected_gradients = gradients(expected, node.v, [x] + ([node.w] if w is not None else []))
    assert 0.05 < expected.mean() < 0.95
    for backend in ("torch", "fused"):
        spikes, v = neuron_multi_step(x, spec, None, w, backend)
        assert torch.equal(spikes, expected)
        assert_close(v, node.v)
        for actual, wanted in zip(
            gradients(spikes, v, [x] + ([w] if w is not None else [])), expected_gradients, strict=True
        ):
            assert_close(actual, wanted)


@pytest.mark.parametrize("v_reset", [0.1, None])
def test_first_potential(v_reset):
    """Given potentials continue a sequence: two halves equal the whole, gradients included."""
    spec = NeuronSpec(tau=3.0, v_reset=v_reset, detach_reset=False, surrogate="atan")
    x = channels_last(6, 2, 5, 4).requires_grad_()
    for backend in ("torch", "fused"):
        whole, v_whole = neuron_multi_step(x, spec, backend="torch")
        first, v = neuron_multi_step(x[:3], spec, backend=backend)
        second, v = neuron_multi_step(x[3:], spec, v, backend=backend)
        halves = torch.cat([first, second])
        assert torch.equal(halves, whole)
        assert_close(v, v_whole)
        assert_close(gradients(halves, v, [x])[0], gradients(whole, v_whole, [x])[0])


SPIKINGJELLYS = [name for name, entry in SURROGATES.items() if entry.spikingjelly is not None]


@pytest.mark.parametrize("name", SPIKINGJELLYS)
def test_every_surrogate(name):
    """All of SpikingJelly's surrogates with an alpha are there, with its default; unfused ones take the reference."""
    spec = NeuronSpec(surrogate=name)
    assert spec.surrogate_alpha == getattr(surrogate, SURROGATES[name][0])().alpha
    x = channels_last(3, 2, 4, 5).requires_grad_()
    node = spikingjelly_neuron(spec)
    expected = node(x)
    spikes, v = neuron_multi_step(x, spec)
    assert torch.equal(spikes, expected)
    assert_close(gradients(spikes, v, [x])[0], gradients(expected, node.v, [x])[0])


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_the_triangular_surrogate_is_that_of_its_paper(alpha):
    """Equation 4 of arXiv 2202.11946, by finite potentials: height 1 / alpha at the threshold, 0 beyond alpha."""
    spec = NeuronSpec("if", surrogate="triangular", alpha=alpha, v_threshold=1.0)
    x = torch.tensor([[1.0, 1.0 + alpha / 2, 1.0 - alpha / 4, 1.0 + alpha, 1.0 - 2 * alpha]], dtype=torch.float64)
    x.requires_grad_()
    spikes, _ = neuron_multi_step(x, spec)
    assert spikes.tolist() == [[1, 1, 0, 1, 0]]
    spikes.sum().backward()
    assert_close(x.grad, torch.tensor([[1, 0.5, 0.75, 0, 0]], dtype=torch.float64) / alpha)


def test_no_surrogate_is_missing():
    """A class of the next SpikingJelly with an alpha would have to be added to the table."""
    classes = (value for value in vars(surrogate).values() if isinstance(value, type))
    found = {
        cls.__name__
        for cls in classes
        if issubclass(cls, surrogate.SurrogateFunctionBase)
        and cls is not surrogate.SurrogateFunctionBase
        and "alpha" in cls.__init__.__code__.co_varnames
    }
    assert found == {SURROGATES[name].spikingjelly for name in SPIKINGJELLYS}


@pytest.mark.parametrize("factor", [0.125, 0.25])
def test_ties_with_the_threshold(factor):
    """Attention feeds multiples of 1/8 against threshold 1/2: potentials hit it exactly, and must fire."""
    spec = NeuronSpec(tau=2.0, v_threshold=0.5)
    for dtype in (torch.float32, torch.float64):
        x = (torch.randint(0, 9, (4, 3, 8, 5), generator=torch.Generator().manual_seed(1)) * factor).to(dtype)
        expected = spikingjelly_neuron(spec)(x)
        assert torch.equal(neuron_multi_step(x, spec, backend="fused")[0], expected)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.contiguous(),
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x[..., ::2],
        lambda x: x[:1].expand(4, -1, -1, -1),
    ],
    ids=["channels-last", "row-major", "samples-first", "gaps", "repeated"],
)
def test_any_memory_order(view):
    x = view(channels_last(4, 3, 5, 6)).detach().requires_grad_()
    spec = NeuronSpec(detach_reset=False)
    expected, v_expected = neuron_multi_step(x, spec, backend="torch")
    spikes, v = neuron_multi_step(x, spec, backend="fused")
    assert torch.equal(spikes, expected)
    assert_close(v, v_expected)
    assert_close(gradients(spikes, v, [x])[0], gradients(expected, v_expected, [x])[0])


def test_large_potentials_and_nan():
    """The surrogate's exponential neither overflows nor hides a NaN."""
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([[0.0, 30.0, -30.0, 1e4, -1e4, 1e30, -1e30, float("nan")]], dtype=dtype, requires_grad=True)
        spec = NeuronSpec(kind="if", detach_reset=True)
        (expected,) = torch.autograd.grad(neuron_multi_step(x, spec, backend="torch")[0].sum(), x)
        (actual,) = torch.autograd.grad(neuron_multi_step(x, spec, backend="fused")[0].sum(), x)
        torch.testing.assert_close(actual, expected, rtol=0, atol=torch.finfo(dtype).eps * 4, equal_nan=True)


def test_sigmoid_gradient_accuracy():
    """Against double precision (and for double itself against extended precision where the machine has it)."""
    import numpy as np

    u = torch.linspace(-20, 5, 4001, dtype=torch.float64)
    for dtype, allowed in ((torch.float32, 5e-7), (torch.float64, 3e-15)):
        x = (u.to(dtype) + 1).requires_grad_()
        (actual,) = torch.autograd.grad(neuron_multi_step(x[None], NeuronSpec(kind="if"), backend="fused")[0].sum(), x)
        z = np.abs(4 * ((x.detach() - 1).numpy().astype(np.longdouble)))
        exact = 4 * np.exp(-z) / (1 + np.exp(-z)) ** 2
        assert np.max(np.abs(actual.numpy() / exact - 1)) < allowed


def test_bfloat16_computes_in_float32():
    x = channels_last(4, 2, 6, 5, dtype=torch.float32).bfloat16()
    for backend in ("torch", "fused"):
        leaf = x.clone().requires_grad_()
        spikes, v = neuron_multi_step(leaf, NeuronSpec(), backend=backend)
        assert spikes.dtype == torch.bfloat16 and v.dtype == torch.float32
        assert torch.equal(spikes.float(), neuron_multi_step(x.float(), NeuronSpec(), backend="torch")[0])
        spikes.float().sum().backward()
        assert leaf.grad.dtype == torch.bfloat16 and leaf.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"spec": NeuronSpec(surrogate="erf"), "backend": "fused"}, "surrogates sigmoid, atan, not 'erf'"),
        ({"x": torch.zeros(2, 0), "backend": "fused"}, "empty"),
        ({"backend": "cupy"}, "--neuron-backend takes one of auto, torch, fused"),
        ({"spec": NeuronSpec(kind="plif")}, "w is the parameter of a plif neuron"),
        ({"w": torch.zeros(())}, "w is the parameter of a plif neuron"),
        ({"spec": NeuronSpec(kind="plif"), "w": torch.zeros(3)}, "scalar"),
        ({"v0": torch.zeros(4)}, r"v0 \(4,\)"),
        ({"x": torch.zeros(4, 3, dtype=torch.int64)}, "floating-point"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        neuron_multi_step(**{"x": torch.zeros(4, 3), "spec": NeuronSpec(), **arguments})


def test_a_log_names_the_backend_and_why_it_is_no_faster_one():
    x, not_here = torch.zeros(2, 3), "not triton: they run on CUDA tensors, not on cpu"
    assert backend_told("auto", x, NeuronSpec()) == f"fused, kernels compiled for the CPU ({not_here})"
    assert backend_told("torch", x, NeuronSpec()) == "torch, plain PyTorch"
    lacking = "not fused: they know the surrogates sigmoid, atan, not 'erf'"
    assert lacking in backend_told("auto", x, NeuronSpec(surrogate="erf"))
    with pytest.raises(
        ValueError, match="the triton kernels cannot be used: .* choose --neuron-backend auto or torch or"
    ):
        backend_told("triton", x, NeuronSpec())


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"kind": "izhikevich"}, "unknown kind='izhikevich'; it is one of lif, if, plif"),
        ({"surrogate": "relu"}, "unknown surrogate='relu'; it is one of sigmoid, atan"),
        ({"tau": 1.0}, "--tau"),
        ({"tau": float("nan")}, "--tau"),
    ],
)
def test_spec_refuses(field, message):
    with pytest.raises(ValueError, match=message):
        NeuronSpec(**field)


@pytest.mark.parametrize("backend", ["torch", "fused"])
@pytest.mark.parametrize("kind", ["lif", "plif"])
def test_bfloat16_keeps_its_own_size(kind, backend):
    """Of the input nothing wider is kept for backward; the potential goes on in float32."""
    spec = NeuronSpec(kind=kind, detach_reset=False)
    w = plif_weight(spec)
    w = None if w is None else w.detach().float().requires_grad_()
    x = (channels_last(4, 2, 7, 3, 3) * 2.5).bfloat16()
    v0 = channels_last(2, 7, 3, 3, seed=2).float()
    whole, leaf = x.float().requires_grad_(), x.clone().requires_grad_()
    expected, last = neuron_multi_step(whole, spec, v0, w, backend)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append((t.dtype, t.numel())) or t, lambda t: t):
        spikes, v = neuron_multi_step(leaf, spec, v0, w, backend)
    assert spikes.dtype == torch.bfloat16 and v.dtype == torch.float32
    assert torch.equal(spikes.float(), expected) and torch.equal(v, last)
    assert (torch.bfloat16, x.numel()) in saved and sum(size for _, size in saved) <= x.numel() + v0.numel() + 1
    learned = [] if w is None else [w]
    wanted, *of_w = torch.autograd.grad(expected.sum() + last.sum(), [whole, *learned])
    found, *of_mine = torch.autograd.grad(spikes.float().sum() + v.sum(), [leaf, *learned])
    assert torch.equal(found, wanted.bfloat16())
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(of_mine, of_w, strict=True))
