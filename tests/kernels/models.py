"""SpikingJelly's and torch's own modules, arranged to do what one call of the kernels does, and what tests share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from spikingjelly.activation_based import neuron, surrogate
from torch import Tensor, nn

from megasnn.kernels import SURROGATES, NeuronSpec
from megasnn.kernels.backends import AUTO_BACKEND, norm_neuron_kernels
from megasnn.kernels.layout import channels_last as in_order
from megasnn.kernels.neuron import neuron_multi_step
from megasnn.kernels.norm_neuron import BatchNorm, norm_pool_neuron
from megasnn.kernels.norm_neuron_kernels import NormNeuron, NormNeuronInput
from megasnn.kernels.spike_codec import bits_of, pack_bits


def spikingjelly_neuron(spec: NeuronSpec, w: Tensor | None = None) -> neuron.BaseNode:
    """The node that ``spec`` describes; a plif node takes the value of ``w``."""
    common = {
        "v_threshold": spec.v_threshold,
        "v_reset": spec.v_reset,
        "detach_reset": spec.detach_reset,
        "surrogate_function": getattr(surrogate, SURROGATES[spec.surrogate][0])(alpha=spec.alpha),
        "step_mode": "m",
    }
    if spec.kind == "if":
        return neuron.IFNode(**common)
    if spec.kind == "lif":
        return neuron.LIFNode(tau=spec.tau, decay_input=spec.decay_input, **common)
    node = neuron.ParametricLIFNode(init_tau=2.0, decay_input=spec.decay_input, **common)
    node.w = nn.Parameter(w.detach().clone())
    return node


def spikingjelly_unit(x: Tensor, norm: nn.Module, node: neuron.BaseNode, pool: bool, time_steps: int) -> Tensor:
    """Norm, pool and neuron with the modules of a SpikingJelly model."""
    x = x.expand(time_steps, *x.shape[1:])
    y = norm(x.flatten(0, 1))
    y = nn.functional.max_pool2d(y, 3, 2, 1) if pool else y
    return node(y.unflatten(0, x.shape[:2]))


def channels_last(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Normal numbers of shape ``[T, N, C, ...]``, channels fastest in memory."""
    generator = torch.Generator().manual_seed(seed)
    memory = [*shape[:2], *shape[3:], shape[2]]
    return torch.randn(memory, generator=generator, dtype=dtype).movedim(-1, 2)


def plif_weight(spec: NeuronSpec, dtype: torch.dtype = torch.float64) -> Tensor | None:
    return torch.tensor(-math.log(1.7), dtype=dtype, requires_grad=True) if spec.kind == "plif" else None


def norm_of(channels: int, dims: int = 5, training: bool = True) -> nn.Module:
    """A batch norm with uneven parameters and statistics, some channels turned upside down."""
    torch.manual_seed(channels)
    norm = (nn.BatchNorm2d if dims == 5 else nn.BatchNorm1d)(channels).double()
    nn.init.normal_(norm.weight, mean=0.8, std=1.5)
    nn.init.normal_(norm.bias, std=0.5)
    nn.init.normal_(norm.running_mean, std=0.3)
    nn.init.uniform_(norm.running_var, 0.5, 2.0)
    return norm.train(training)


def gradients(spikes: Tensor, inputs: Sequence[Tensor], v: Tensor | None = None) -> tuple[Tensor, ...]:
    """Of a fixed function of spikes and last potential, which bfloat16 holds."""
    weights = channels_last(*spikes.shape, seed=7).bfloat16().to(spikes.dtype)
    value = (spikes * weights).sum()
    return torch.autograd.grad(value if v is None else value + (v * weights[0]).sum(), inputs)


def neuron_results(
    x: Tensor, spec: NeuronSpec, backend: str = AUTO_BACKEND, w: Tensor | None = None, v0: Tensor | None = None
) -> list[Tensor]:
    """Spikes, last potential, and the gradients of a fixed function."""
    spikes, v = neuron_multi_step(x, spec, v0, w, backend)
    return [spikes, v, *gradients(spikes, [each for each in (x, v0, w) if each is not None], v)]


def spikingjelly_results(x: Tensor, spec: NeuronSpec, w: Tensor | None = None) -> list[Tensor]:
    """The same of SpikingJelly's node."""
    node = spikingjelly_neuron(spec, w)
    spikes = node(x)
    return [spikes, node.v, *gradients(spikes, [x] if w is None else [x, node.w], node.v)]


def unit_forward(
    x: Tensor,
    norm: nn.Module,
    spec: NeuronSpec,
    backend: str,
    *,
    pool: bool = False,
    time_steps: int | None = None,
    above: bool = False,
    **options: Any,
) -> list[Tensor]:
    """Spikes, mean and variance of a unit with the values of a norm."""
    running = None if norm.training or norm.running_mean is None else (norm.running_mean, norm.running_var)
    given = BatchNorm(norm.weight, norm.bias, running)
    norm_neuron = NormNeuron(spec, norm.eps, pool, time_steps or len(x), int(above))
    return list(norm_pool_neuron(x, given, norm_neuron, backend=backend, **options)[:3])


def unit_results(
    x: Tensor, norm: nn.Module, spec: NeuronSpec, backend: str, *, above: bool = False, **options: Any
) -> list[Tensor]:
    """These, and the gradients of a fixed function: of the input, the norm's parameters, and the neuron's.

    Args:
        above: whether the first row is another rank's.
    """
    found = unit_forward(x, norm, spec, backend, above=above, **options)
    learned = [each for each in (norm.weight, norm.bias, options.get("w")) if each is not None]
    return [*found, *gradients(found[0], [x, *learned])]


def assert_close(actual: Tensor, expected: Tensor, relative: float = 1e-10, least: float = 0.0) -> None:
    """Largest difference within ``relative`` of the largest value, or of ``least``."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    scale = max(expected.abs().max().item(), least)
    assert (actual - expected).abs().max().item() <= relative * scale, (actual, expected)


def require_same(found: list[Tensor], wanted: list[Tensor], relative: float = 1e-10) -> None:
    """Equal spikes, and all else within a share of the largest value."""
    assert torch.equal(found[0], wanted[0])
    for actual, expected in zip(found[1:], wanted[1:], strict=True):
        assert_close(actual, expected, relative)


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """So many threads of torch, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def saved_tensors() -> Iterator[list[tuple[torch.dtype, int]]]:
    """Types and sizes of what autograd saves."""
    saved: list[tuple[torch.dtype, int]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: saved.append((each.dtype, each.numel())) or each, lambda each: each
    ):
        yield saved


def two_ranks_equal_one(backend: str) -> None:
    """Between the calls, two that share the samples exchange statistics and sums: together they are one."""
    norm_neuron = NormNeuron(NeuronSpec(kind="plif", detach_reset=False), 1e-5, True, 3)
    x, w = channels_last(3, 3, 6, 5, 4) * 2, plif_weight(norm_neuron.spec)
    assert w is not None
    g = channels_last(3, 3, 6, 3, 2, seed=5)
    weight, bias = torch.linspace(-1, 2, 6).double(), torch.linspace(0, 1, 6).double()
    parts = [(in_order(x[:, part]), in_order(g[:, part])) for part in (slice(1), slice(1, None))]
    counts = [part.numel() // 6 for part, _ in parts]
    kernels = [norm_neuron_kernels(backend, part, norm_neuron) for part, _ in parts]
    found = [each.statistics(part).moments for each, (part, _) in zip(kernels, parts, strict=True)]
    mean = sum(n * each[0] for n, each in zip(counts, found, strict=True)) / sum(counts)
    moments = [n * (each[1] + (each[0] - mean) ** 2) for n, each in zip(counts, found, strict=True)]
    norm = (mean, sum(moments) / sum(counts), weight, bias)
    given = [
        (of_part, NormNeuronInput(part, *norm, w), g_part)
        for of_part, (part, g_part) in zip(kernels, parts, strict=True)
    ]
    spikes = torch.cat([of_part.fire(inputs)[0] for of_part, inputs, _ in given], dim=1)
    backwards = [of_part.backward_sums(inputs, g_part, True) for of_part, inputs, g_part in given]
    sums: Tensor = sum(each.sums for each in backwards)
    gradients = [
        of_part.input_gradient(inputs, g_part, sums, sum(counts), each.intermediate)
        for (of_part, inputs, g_part), each in zip(given, backwards, strict=True)
    ]
    whole = x.requires_grad_()
    expected, *_ = norm_pool_neuron(whole, BatchNorm(weight, bias), norm_neuron, w, backend="torch")
    assert torch.equal(spikes, expected)
    assert_close(torch.cat(gradients, dim=1), torch.autograd.grad(expected, whole, g)[0], 1e-9)


def spikes_leave_packed_as_well(backend: str) -> None:
    # Of 24 channels some neurons are left over, whole bytes of them, when many are computed at once.
    for channels, pool in ((16, False), (24, False), (24, True), (3, False)):
        x = channels_last(4, 1, channels, 5, 5) * 2
        norm = (torch.zeros(channels), torch.ones(channels), None, None)
        kernels = norm_neuron_kernels(backend, x, NormNeuron(NeuronSpec(), 1e-5, pool, 4))
        spikes, bits = kernels.fire(NormNeuronInput(x, *norm), packed=True)
        assert bits is not None and torch.equal(bits, pack_bits(spikes)) and 0 < spikes.sum() < spikes.numel()


def neurons_alone_leave_their_spikes_packed_as_well(backend: str) -> None:
    """In training, where layers would pack them in the same order: with their channels last."""
    cases = {
        "frames": channels_last(4, 1, 24, 5, 5),
        "odd frames": channels_last(4, 1, 3, 5, 5),
        "features": torch.linspace(-1, 3, 4 * 2 * 20).view(4, 2, 20).roll(3, 2),
        "odd features": torch.linspace(-1, 3, 4 * 3 * 5).view(4, 3, 5).roll(3, 2),
        "row-major": channels_last(4, 1, 16, 5, 5).contiguous(),
        "repeated": channels_last(1, 2, 8, 3, 3).expand(4, 2, 8, 3, 3),
        "bf16": channels_last(4, 2, 8, 3, 3).bfloat16(),
    }
    for name, x in cases.items():
        spikes, v = neuron_multi_step((2 * x).requires_grad_(), NeuronSpec(), backend=backend)
        bits = bits_of(spikes)
        assert bits is not None and torch.equal(bits, pack_bits(spikes.contiguous())) == (x.ndim == 3), name
        assert torch.equal(bits, pack_bits(spikes.movedim(2, -1))) and 0 < spikes.sum() < spikes.numel(), name
        going_on, _ = neuron_multi_step(2 * x, NeuronSpec(), v.detach(), backend=backend)
        assert torch.equal(bits_of(going_on), pack_bits(going_on)), name
        with torch.no_grad():
            assert bits_of(neuron_multi_step(x, NeuronSpec(), backend=backend)[0]) is None
