"""The Triton kernels, interpreted on the CPU, against the reference: `..._in_there` runs in a process of its own."""

from __future__ import annotations

import itertools
import math
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megasnn.common.random import philox_key
from megasnn.kernels import NeuronSpec
from megasnn.kernels.backends import AUTO_BACKEND, BACKENDS, backend_for
from megasnn.kernels.neuron import neuron_multi_step
from megasnn.kernels.norm_neuron import BatchNorm, NormNeuron, norm_pool_neuron
from megasnn.kernels.philox import Runs, kept_by_tensors
from megasnn.kernels.spike_codec import TERNARY, bits_of, pack_bits, pack_counts, pack_ternary
from tests.kernels.far_memory import BLOCK, FAR, far_kernels
from tests.kernels.models import (
    assert_close,
    channels_last,
    gradients,
    neuron_results,
    neurons_alone_leave_their_spikes_packed_as_well,
    norm_of,
    plif_weight,
    require_same,
    saved_tensors,
    spikes_leave_packed_as_well,
    two_ranks_equal_one,
    unit_results,
)
from tests.kernels.test_neuron import CHARGES, FEW
from tests.kernels.triton_process import interpreted as interpreted
from tests.kernels.triton_process import without_triton

pytestmark = without_triton

TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-6}  # of values about 1: the reference's 1 - sigmoid(x) cancels
EXAMPLES = settings(max_examples=8, deadline=None, derandomize=True, database=None)

specs = st.builds(
    lambda charge, v_reset, detach, surrogate: NeuronSpec(
        **charge, v_threshold=0.6, v_reset=v_reset, detach_reset=detach, surrogate=surrogate
    ),
    st.sampled_from(list(CHARGES.values())),
    st.sampled_from([0.0, -0.3, None]),
    st.booleans(),
    st.sampled_from(["sigmoid", "atan"]),
)


def assert_same_neurons(x: Tensor, spec: NeuronSpec, v0: Tensor | None) -> None:
    """Spikes and potentials of the reference, bit for bit, and its gradients."""
    w = plif_weight(spec, x.dtype)
    found, wanted = (neuron_results(x, spec, backend, w, v0) for backend in ("triton", "torch"))
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    for actual, expected in zip(found[2:], wanted[2:], strict=True):
        assert_close(actual, expected, TOLERANCE[x.dtype], least=1.0)


def every_neuron_in_there() -> None:
    for name, v_reset, detach, surrogate in FEW:
        spec = NeuronSpec(**CHARGES[name], v_threshold=0.6, v_reset=v_reset, detach_reset=detach, surrogate=surrogate)
        dtype = torch.float32 if detach else torch.float64
        x = (channels_last(3, 2, 5, 3, dtype=dtype) * 2.5).requires_grad_()
        assert_same_neurons(x, spec, channels_last(1, 2, 5, 3, dtype=dtype, seed=1)[0].requires_grad_())


@given(
    spec=specs,
    shape=st.tuples(st.integers(1, 16), st.integers(1, 3), st.integers(1, 33), st.integers(1, 5)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    view=st.sampled_from([lambda x: x, Tensor.contiguous, lambda x: x[..., ::2], lambda x: x[:1].expand_as(x)]),
    given_v=st.booleans(),
)
@EXAMPLES
def any_size_in_there(spec, shape, dtype, view, given_v) -> None:
    x = view(channels_last(*shape, dtype=dtype) * 2).detach().requires_grad_()
    v0 = channels_last(*x.shape, dtype=dtype, seed=1)[0].detach().requires_grad_() if given_v else None
    assert_same_neurons(x, spec, v0)


def assert_same_units(x: Tensor, spec: NeuronSpec, training: bool = True, **options: Any) -> None:
    x, norm = x.detach().requires_grad_(), norm_of(x.shape[2], training=training)
    options["w"] = plif_weight(spec)
    require_same(*(unit_results(x, norm, spec, each, **options) for each in ("triton", "torch")), 1e-9)


@given(
    spec=specs,
    shape=st.tuples(st.integers(1, 9), st.integers(1, 2), st.integers(1, 40), st.integers(1, 6), st.integers(2, 5)),
    tokens=st.booleans(),
    pool=st.booleans(),
    static=st.booleans(),
    training=st.booleans(),
    above=st.booleans(),
)
@EXAMPLES
def any_unit_in_there(spec, shape, tokens, pool, static, training, above) -> None:
    steps = shape[0]
    x = channels_last(1 if static else steps, *(shape[1:-1] if tokens else shape[1:])) * 2 + 0.3
    pool = pool and not tokens
    above = above and pool and shape[3] > 1
    if x[:, :, 0, above:].numel() > 1:
        assert_same_units(x, spec, training, pool=pool, time_steps=steps, above=above)


def many_steps_in_there() -> None:
    """More than registers hold: in loops over chunks, of which the last is whole or not."""
    from megasnn.kernels.triton.launch import chunk

    for dtype, steps, charge in ((torch.float64, 17, "lif-3-leak"), (torch.float32, 40, "plif")):
        assert steps > chunk(dtype, steps) and (steps % chunk(dtype, steps) == 0) == (steps == 40)
        spec = NeuronSpec(**CHARGES[charge], v_threshold=0.6, detach_reset=False)
        x = (channels_last(steps, 2, 5, 3, dtype=dtype) * 2.5).requires_grad_()
        assert_same_neurons(x, spec, channels_last(1, 2, 5, 3, dtype=dtype, seed=1)[0].requires_grad_())
    steps, spec = 18, NeuronSpec(kind="plif", v_reset=None)
    for static, pool in ((False, False), (False, True), (True, True)):
        x = channels_last(1 if static else steps, 2, 24, 5, 4) * 2 + 0.3
        assert_same_units(x, spec, pool=pool, time_steps=steps)


def sums_of_many_programs_in_there() -> None:
    """More values than a program takes, and than there are programs before one takes several tiles."""
    from megasnn.kernels.triton import norm_neuron_launches as launches

    tiling = launches.SumTiling.of(1 << 30, 48, 8)
    assert tiling.tiles == launches.TILES and tiling.programs * tiling.tiles * tiling.rows * tiling.row >= 1 << 30
    with mock.patch.object(launches, "PROGRAMS", 1):
        for shape in ((2, 3, 24, 17, 18), (2, 1, 160, 5, 6)):
            assert_same_units(channels_last(*shape) * 2 + 5, NeuronSpec("plif"))


def pool_in_there() -> None:
    """The first of equal values takes the gradient, as in torch; a NaN wins."""
    x = torch.randint(0, 3, (2, 2, 9, 8, 4), generator=torch.Generator().manual_seed(0)).double().movedim(-1, 2)
    x[0, 0, 1, 2, 3] = math.nan
    x.requires_grad_()
    norm = torch.nn.BatchNorm2d(4).double().eval()
    results = (unit_results(x, norm, NeuronSpec(kind="if"), each, pool=True) for each in ("torch", "triton"))
    (spikes, _, _, wanted, *_), (found, _, _, actual, *_) = results
    assert torch.equal(found, spikes)
    torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-9, equal_nan=True)


def reduced_types_in_there() -> None:
    """Inputs of 16 bits are computed in float32: the same potentials; and with equal statistics the same spikes."""
    for dtype, spec in itertools.product((torch.bfloat16, torch.float16), (NeuronSpec(), NeuronSpec(tau=3.0))):
        x = (channels_last(5, 2, 8, 5, dtype=torch.float32) * 2).to(dtype).requires_grad_()
        (spikes, v), (found, found_v) = (neuron_multi_step(x, spec, backend=each) for each in ("torch", "triton"))
        assert torch.equal(found, spikes) and torch.equal(found_v, v) and found.dtype == dtype
        wanted, actual = (gradients(each, [x])[0] for each in (spikes, found))
        assert_close(actual.float(), wanted.float(), torch.finfo(dtype).eps)
        statistics = torch.full((8,), 0.1), torch.full((8,), 1.3)
        for x_t, pool in itertools.product((x, x.float()), (False, True)):
            image = x_t.detach().unsqueeze(-1)
            wanted, actual = (
                norm_pool_neuron(image, BatchNorm(running=statistics), NormNeuron(spec, 1e-5, pool, 5), backend=each)[0]
                for each in ("fused", "triton")
            )
            assert torch.equal(actual, wanted)


def gradients_of_bfloat16_in_there() -> None:
    x = (channels_last(4, 2, 24, 6, 5, dtype=torch.float32) * 2).bfloat16()
    norm, tolerances = torch.nn.BatchNorm2d(24), (1e-6, 1e-6, 2**-7, 1e-6, 1e-6)
    for pool in (False, True):
        leaf = x.clone().requires_grad_()
        wanted, found = (unit_results(leaf, norm, NeuronSpec(), each, pool=pool) for each in ("fused", "triton"))
        assert torch.equal(found[0], wanted[0])
        assert found[0].dtype == torch.bfloat16 and found[1].dtype == torch.float64
        # The interpreter cuts bits off where a GPU rounds to bfloat16.
        for actual, expected, relative in zip(found[1:], wanted[1:], tolerances, strict=True):
            assert_close(actual.float(), expected.float(), relative)


def bits_in_there() -> None:
    """Two ranks exchange between the calls; spikes leave as bits as well, and know them until somebody changes them."""
    two_ranks_equal_one("triton")
    spikes_leave_packed_as_well("triton")
    neurons_alone_leave_their_spikes_packed_as_well("triton")
    x = channels_last(3, 2, 8, 4, 5).requires_grad_()
    norm_neuron = NormNeuron(NeuronSpec(), 1e-5, False, 3)
    spikes, *_ = norm_pool_neuron(x, BatchNorm(), norm_neuron, backend="triton")
    with torch.no_grad():
        untrained, *_ = norm_pool_neuron(x, BatchNorm(), norm_neuron, backend="triton")
    assert torch.equal(bits_of(spikes), pack_bits(spikes)) and bits_of(untrained) is None
    assert bits_of(spikes + 0) is None and bits_of(spikes.view_as(spikes)) is None
    with torch.no_grad():
        spikes.mul_(2)
    assert bits_of(spikes) is None


@given(st.integers(0, 4100), st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.bool]))
@EXAMPLES
def codec_in_there(size, dtype) -> None:
    from megasnn.kernels.triton import codec

    generator = torch.Generator().manual_seed(size)
    spikes = torch.randint(0, 2, (size,), generator=generator).to(dtype)
    counts = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), generator=generator).to(dtype)
    for pack, plain, values in (
        (codec.launch_pack_bits, pack_bits, spikes),
        (codec.launch_pack_counts, pack_counts, counts),
    ):
        packed, strange = pack(values, True)
        assert torch.equal(packed, plain(values)) and not strange.any()
        assert pack(values, False)[1] is None
        for odd in (-0.0, 0.5, -1.0, 256.0, math.nan) if size and dtype.is_floating_point else ():
            wrong = values.clone()
            wrong[size // 2] = odd
            assert pack(wrong, True)[1].any(), odd
    out = torch.empty(1, size, dtype=dtype)
    codec.launch_unpack_bits(codec.launch_pack_bits(spikes, False)[0], out)
    assert torch.equal(out[0], spikes)
    wide = torch.zeros(size // 7, 10)
    bits = spikes[: 7 * (size // 7)].float()
    codec.launch_unpack_bits(pack_bits(bits), wide[:, 2:9])
    assert torch.equal(wide[:, 2:9], bits.view(-1, 7)) and not wide[:, [0, 1, 9]].any()


@given(st.integers(0, 4100), st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64]))
@EXAMPLES
def ternary_codec_in_there(size, dtype) -> None:
    from megasnn.kernels.triton import codec

    generator = torch.Generator().manual_seed(size)
    spikes = torch.randint(-1, 2, (size,), generator=generator).to(dtype)
    packed, strange = codec.launch_pack_ternary(spikes, True)
    assert torch.equal(packed, pack_ternary(spikes)) and not strange.any()
    for odd in (-0.0, 0.5, -2.0, 2.0, math.nan) if size and dtype.is_floating_point else ():
        wrong = spikes.clone()
        wrong[size // 2] = odd
        assert codec.launch_pack_ternary(wrong, True)[1].any(), odd
    out = torch.empty(1, size, dtype=dtype)
    codec.launch_unpack_ternary(packed, out)
    assert torch.equal(out[0], spikes)
    wide = torch.zeros(size // 7, 10)
    values = spikes[: 7 * (size // 7)].float()
    codec.launch_unpack_ternary(pack_ternary(values), wide[:, 2:9])
    assert torch.equal(wide[:, 2:9], values.view(-1, 7)) and not wide[:, [0, 1, 9]].any()


def bispike_in_there() -> None:
    """Spikes, potentials and gradients of the reference, bit for bit, for one amplitude and several."""
    spec = NeuronSpec("bispike", v_threshold=0.7)
    assert backend_for(AUTO_BACKEND, torch.zeros(2, 3), spec) is BACKENDS["triton"]
    for dtype, shape in itertools.product((torch.float32, torch.float64), ((5, 2, 8, 3), (4, 1, 3, 5), (1, 3, 40, 9))):
        x = channels_last(*shape, dtype=dtype).requires_grad_()
        v0 = channels_last(1, *shape[1:], dtype=dtype, seed=1)[0].requires_grad_()
        for w in (None, torch.linspace(0.4, 1.3, shape[0], dtype=dtype)):
            results = []
            for backend in ("torch", "triton"):
                spikes, v = neuron_multi_step(x, spec, v0, w, backend)
                assert torch.equal(bits_of(spikes, TERNARY), pack_ternary(spikes, check=True))
                results.append([spikes, v, *gradients(spikes, [x, v0], v)])
            assert all(map(torch.equal, *results))
    low = channels_last(4, 2, 7, 3, dtype=torch.float32).bfloat16().requires_grad_()
    (expected, last), (spikes, v) = (neuron_multi_step(low, spec, backend=each) for each in ("torch", "triton"))
    assert torch.equal(spikes, expected) and torch.equal(v, last) and spikes.dtype == torch.bfloat16
    wanted, found = (gradients(each, [low])[0].float() for each in (expected, spikes))
    assert_close(found, wanted, torch.finfo(torch.bfloat16).eps)  # the interpreter cuts bits off


def philox_in_there() -> None:
    from megasnn.kernels.triton.philox import kept_by_kernel

    keys = torch.tensor([philox_key("test", sample) for sample in range(3)]).t().contiguous()
    cuts = [
        (3, Runs(1, 35, 0, 35)),
        (2, Runs(9, 12, 6, 3)),
        (2, Runs(1, 5, 1, 1)),
        (2, Runs(1, 2**34, 2**34 - 7, 7)),  # counters beyond 32 bits
        (1, Runs(2, 4, 0, 0)),
        (1, Runs(1, 5000, 3, 4991)),
    ]
    for (steps, cut), threshold in itertools.product(cuts, (0, 5033165, 2**24)):
        kept = kept_by_kernel(threshold, keys, steps, *cut)
        assert torch.equal(kept, kept_by_tensors(threshold, keys, steps, cut)), (cut, threshold)


def saved_in_there() -> None:
    """Of the input nothing but itself is kept for backward, in its own type."""
    for dtype, norm in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        x, weight = channels_last(4, 2, 16, 8, 8).to(dtype).requires_grad_(), torch.ones(16, requires_grad=True)
        with saved_tensors() as saved:
            if norm:
                norm_pool_neuron(
                    x, BatchNorm(weight, weight), NormNeuron(NeuronSpec(), 1e-5, True, 4), backend="triton"
                )
            else:
                neuron_multi_step(x, NeuronSpec(), backend="triton")
        assert (dtype, x.numel()) in saved and sum(size for _, size in saved) <= x.numel() + 7 * 16


def chosen_in_there() -> None:
    """Triton is taken where it can be used."""
    x, spec = torch.zeros(2, 3), NeuronSpec()
    assert backend_for(AUTO_BACKEND, x, spec) is BACKENDS["triton"]
    for given_x, given_spec in ((x, NeuronSpec(surrogate="erf")), (x.long(), spec), (x[:0], spec)):
        assert BACKENDS["triton"].unavailable(given_x, given_spec)


def far_steps_in_there() -> None:
    """The same as of steps that lie side by side, at once and in a loop over chunks."""
    for chunk in (5, 2):
        for expected, found in zip(far_kernels(BLOCK, 5, 1, chunk), far_kernels(FAR, 5, 1, chunk), strict=True):
            assert expected[-1].any() and torch.equal(found, expected), chunk


CASES = (
    *(every_neuron_in_there, any_size_in_there, any_unit_in_there, many_steps_in_there, sums_of_many_programs_in_there),
    *(pool_in_there, reduced_types_in_there, gradients_of_bfloat16_in_there, bits_in_there, codec_in_there),
    *(ternary_codec_in_there, bispike_in_there),
    *(philox_in_there, saved_in_there, chosen_in_there, far_steps_in_there),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removesuffix("_in_there"))
def test_equals_the_reference(interpreted, case) -> None:
    interpreted(case)
