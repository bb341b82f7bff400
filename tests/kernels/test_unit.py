"""Norm, pool and neuron together: both backends against nn.BatchNorm, max_pool2d and SpikingJelly's nodes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megasnn.kernels import NeuronSpec
from megasnn.kernels.backends import norm_neuron_kernels
from megasnn.kernels.layout import channels_last as in_order
from megasnn.kernels.norm_neuron import BatchNorm, norm_pool_neuron
from megasnn.kernels.norm_neuron_kernels import NormNeuron, NormNeuronInput
from megasnn.kernels.torch_backend import batch_norm
from tests.kernels.models import (
    assert_close,
    channels_last,
    gradients,
    neurons_alone_leave_their_spikes_packed_as_well,
    norm_of,
    plif_weight,
    require_same,
    saved_tensors,
    spikes_leave_packed_as_well,
    spikingjelly_neuron,
    spikingjelly_unit,
    torch_threads,
    two_ranks_equal_one,
    unit_forward,
    unit_results,
)

BOTH = "torch", "fused"
SPECS = {
    "spikformer": NeuronSpec(),
    "soft-atan": NeuronSpec(v_reset=None, tau=3.0, v_threshold=0.7, detach_reset=False, surrogate="atan"),
    "leak": NeuronSpec(v_reset=-0.2, decay_input=False, v_threshold=1.5),
    "if": NeuronSpec(kind="if", v_reset=None),
    "plif": NeuronSpec(kind="plif", v_threshold=0.5, detach_reset=False),
}


def check(shape, spec, *, pool=False, time_steps=None, training=True):
    x = (channels_last(*shape) * 2 + 0.3).requires_grad_()
    norm, w = norm_of(shape[2], len(shape), training), plif_weight(spec)
    steps = time_steps or shape[0]
    node = spikingjelly_neuron(spec, w)
    before = norm.running_mean.clone(), norm.running_var.clone()
    expected = spikingjelly_unit(x, norm, node, pool, steps)
    after = norm.running_mean.clone(), norm.running_var.clone()
    norm.running_mean, norm.running_var = before
    wanted = gradients(expected, [x, norm.weight, norm.bias] + ([node.w] if w is not None else []))
    assert 0 < expected.sum() < expected.numel()
    for backend in BOTH:
        spikes, mean, var, *found = unit_results(x, norm, spec, backend, pool=pool, time_steps=time_steps, w=w)
        require_same([spikes, *found], [expected, *wanted])
        assert spikes.movedim(2, -1).is_contiguous()
        if training:  # the running statistics as torch would have updated them
            count = steps * x[0].numel() // x.shape[2]
            assert_close(0.9 * before[0] + 0.1 * mean, after[0])
            assert_close(0.9 * before[1] + 0.1 * var * count / (count - 1), after[1])
        else:
            assert torch.equal(mean, norm.running_mean) and torch.equal(var, norm.running_var)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("inputs", [4, 1], ids=["sequence", "static"])
@pytest.mark.parametrize(("name", "pool"), [*((name, False) for name in SPECS), ("soft-atan", True), ("plif", True)])
def test_equals_spikingjelly(name, pool, inputs, training) -> None:
    check((inputs, 2, 5, 7, 6), SPECS[name], pool=pool, time_steps=4, training=training)


SIZES = [(3, 1, 16, 4, 4), (2, 3, 1, 5, 5), (4, 2, 33, 3, 8), (1, 2, 7, 9, 1), (2, 1, 600, 3, 2), (2, 2, 8, 1, 6)]
SIZES += [(3, 5, 24, 17, 18), (2, 2, 2, 70, 70)]


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_sizes(shape, pool) -> None:
    check(shape, SPECS["spikformer"], pool=pool)
    check((*shape[:3], 11), SPECS["plif"])  # tokens


def test_pool_gives_ties_to_the_first() -> None:
    """A flat image region has nine equal values in a window; the gradient belongs to the first, as in torch."""
    x = torch.randint(0, 3, (2, 2, 9, 8, 4), generator=torch.Generator().manual_seed(0)).double().movedim(-1, 2)
    x.requires_grad_()
    norm = norm_of(4)
    expected = spikingjelly_unit(x, norm, spikingjelly_neuron(NeuronSpec()), True, 2)
    wanted = gradients(expected, [x])
    for backend in BOTH:
        spikes, _, _, of_x, *_ = unit_results(x, norm, NeuronSpec(), backend, pool=True)
        require_same([spikes, of_x], [expected, *wanted])


def test_float32() -> None:
    """The backends differ by rounding alone: hardly any spike, and where none differs, gradients to 1e-4."""
    x = (channels_last(4, 4, 32, 16, 16, dtype=torch.float32) * 3 + 1).requires_grad_()
    norm = norm_of(32).float()
    inputs = [x, norm.weight, norm.bias]
    for pool in (False, True):
        (s1, m1, v1), (s2, m2, v2) = (unit_forward(x, norm, NeuronSpec(), each, pool=pool) for each in BOTH)
        assert s2.dtype == torch.float32 and (s1 != s2).sum() <= 3
        assert_close(m2, m1, 1e-6)
        assert_close(v2, v1, 1e-6)
        upstream = torch.where(s1 == s2, channels_last(*s1.shape, dtype=torch.float32, seed=3), torch.zeros(()))
        of_plain, of_loops = (torch.autograd.grad(spikes, inputs, upstream) for spikes in (s1, s2))
        for a, b in zip(of_loops, of_plain, strict=True):
            assert_close(a, b, 1e-4 if torch.equal(s1, s2) else 1e-2)


def test_statistics_with_a_large_mean() -> None:
    """Mean 1000, deviation 1, in float32: squares of the raw values would lose the variance."""
    x = channels_last(4, 4, 8, 16, 16, dtype=torch.float32) + 1000
    _, mean, var, _ = norm_pool_neuron(x, BatchNorm(), NormNeuron(NeuronSpec(), 1e-5, False, 4), backend="fused")
    exact = x.double()
    torch.testing.assert_close(mean.double(), exact.mean((0, 1, 3, 4)), rtol=1e-7, atol=0)
    torch.testing.assert_close(var.double(), exact.var((0, 1, 3, 4), correction=0), rtol=1e-5, atol=0)


def test_without_parameters_and_with_frozen_ones() -> None:
    x = channels_last(3, 2, 6, 5, 5).requires_grad_()
    bare = nn.BatchNorm2d(6, affine=False, track_running_stats=False).eval()
    require_same(*(unit_results(x, bare, NeuronSpec(), backend) for backend in BOTH))
    norm = norm_of(6)
    norm.weight.requires_grad_(False)
    for backend in BOTH:
        spikes, mean, var = unit_forward(x.detach(), norm, NeuronSpec(), backend)
        norm.bias.grad = None
        spikes.sum().backward()
        assert norm.weight.grad is None and norm.bias.grad.abs().sum() > 0
        assert not mean.requires_grad and not var.requires_grad


def test_row_major_input_and_gradient() -> None:
    x, norm = channels_last(3, 2, 6, 5, 5), norm_of(6)
    wanted = None
    for memory in (x, x.contiguous()):
        leaf = memory.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        for backend in BOTH:
            spikes, _, _ = unit_forward(leaf, norm, NeuronSpec(), backend, pool=True)
            weights = channels_last(*spikes.shape, seed=3).contiguous()
            (gradient,) = torch.autograd.grad((spikes * weights).sum(), leaf)
            wanted = gradient if wanted is None else wanted
            assert_close(gradient, wanted)


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("backend", BOTH)
def test_bfloat16_keeps_its_own_size(backend, training, pool) -> None:
    """The input is kept for backward as it came, in two bytes, beside eight numbers a channel. float32's arithmetic."""
    x = channels_last(4, 2, 8, 6, 6, dtype=torch.float32).bfloat16()
    norm = norm_of(8, 5, training).float()
    whole, leaf = x.float().requires_grad_(), x.clone().requires_grad_()
    wanted = unit_results(whole, norm, NeuronSpec(), backend, pool=pool)
    with saved_tensors() as saved:
        found = unit_forward(leaf, norm, NeuronSpec(), backend, pool=pool)
    assert (torch.bfloat16, x.numel()) in saved and sum(size for _, size in saved) <= x.numel() + 8 * 8
    found += gradients(found[0], [leaf, norm.weight, norm.bias])
    assert found[0].dtype == found[3].dtype == torch.bfloat16 and found[1].dtype == torch.float64
    assert not any(each.requires_grad for each in found[1:3])
    assert all(torch.equal(mine, theirs.to(mine.dtype)) for mine, theirs in zip(found, wanted, strict=True))


def test_threads_do_not_change_a_bit() -> None:
    x = channels_last(4, 3, 24, 40, 40, dtype=torch.float32).requires_grad_()
    norm = norm_of(24).float()
    for pool in (False, True):
        results = []
        for count in (1, 3):
            with torch_threads(count):
                results.append(unit_results(x, norm, NeuronSpec(), "fused", pool=pool))
        assert all(torch.equal(one, three) for one, three in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("shape", "spec", "named"),
    [
        ((3, 3, 4, 5, 6), NeuronSpec(), "--time-steps"),
        ((1, 1, 4, 1, 1), NeuronSpec(), "more than one value per channel"),
        ((2, 3, 4, 5, 6), NeuronSpec(surrogate="rect"), "--neuron-backend auto or torch"),
    ],
)
def test_refuses(shape, spec, named) -> None:
    with pytest.raises(ValueError, match=named):
        norm_pool_neuron(torch.zeros(shape), BatchNorm(), NormNeuron(spec, 1e-5, False, 2), backend="fused")


@pytest.mark.parametrize("channels", [33, 48], ids=["rows begin anywhere", "rows begin with a line"])
def test_large_results_equal_those_of_their_samples(channels) -> None:
    """Results of 4 MiB and more are written past the caches, those of a single sample are not."""
    norm_neuron = NormNeuron(NeuronSpec(), 1e-5, False, 4)
    x, g = channels_last(4, 6, channels, 29, 25), channels_last(4, 6, channels, 29, 25, seed=3)
    assert x.nbytes >= 4 * 2**20 > x.nbytes / 6
    kernels, of_whole = (norm_neuron_kernels("fused", each, norm_neuron) for each in (x[:, :1], x))
    norm = (*of_whole.statistics(x).moments, None, None)
    given = [NormNeuronInput(in_order(x[:, n : n + 1]), *norm) for n in range(6)]
    whole_input = NormNeuronInput(x, *norm)
    spikes = torch.cat([kernels.fire(each)[0] for each in given], dim=1)
    assert torch.equal(of_whole.fire(whole_input)[0], spikes)
    intermediate = [
        kernels.backward_sums(each, in_order(g[:, n : n + 1]), False).intermediate for n, each in enumerate(given)
    ]
    whole = of_whole.backward_sums(whole_input, g, False).intermediate
    assert torch.equal(torch.from_numpy(whole), torch.cat([torch.from_numpy(each) for each in intermediate], dim=1))


@pytest.mark.parametrize("backend", BOTH)
def test_the_four_calls(backend) -> None:
    two_ranks_equal_one(backend)
    neurons_alone_leave_their_spikes_packed_as_well(backend)
    spikes_leave_packed_as_well(backend)


@pytest.mark.parametrize("frames", [1, 2])
def test_the_gradient_does_not_depend_on_the_memory_order(frames) -> None:
    """torch 2.13's batch norm gives a wrong gradient for a single frame in channels-last order."""
    generator = torch.Generator().manual_seed(3)
    values, grad = torch.randn(2, frames, 8, 5, 5, dtype=torch.float64, generator=generator)
    mean, var = values.mean((0, 2, 3), keepdim=True), values.var((0, 2, 3), keepdim=True, correction=0)
    expected = (grad * (values - mean) / (var + 1e-5).sqrt()).sum((0, 2, 3))
    of_inputs = []
    for given in (grad, grad.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)):
        leaf = values.clone().requires_grad_()
        x = leaf.permute(0, 2, 3, 1).contiguous().view(1, frames, 5, 5, 8).movedim(-1, 2).flatten(0, 1)
        weight = torch.ones(8, dtype=torch.float64, requires_grad=True)
        (batch_norm(x, None, weight, None, 1e-5) * 1).backward(given)
        assert_close(weight.grad, expected)
        of_inputs.append(leaf.grad)
    assert_close(*of_inputs)
