"""The machine code of the Triton kernels, for GPUs that are not there: compiled as the calls would start them."""

from __future__ import annotations

import re
from unittest import mock

import numpy as np
import pytest
import torch

from megasnn.kernels import BACKENDS, NeuronSpec
from megasnn.kernels.norm_neuron import BatchNorm, NormNeuron, norm_pool_neuron
from megasnn.kernels.philox import Runs
from tests.kernels.models import channels_last, plif_weight
from tests.kernels.triton_code import compiled, compiling_for

pytest.importorskip("triton", reason="triton is made for Linux on x86-64")

BACKWARD = ("backward_sums_kernel", "gradient_kernel")
LANES = 8  # values of bfloat16 in 128 bits
MANY_STEPS = 16  # as many as a forward writes out; a backward goes through them in a loop
ENDLESS = 1000  # steps in loops


@pytest.mark.parametrize("decay_input", [True, False])
def test_a_charge_that_divides_is_exact(decay_input: bool) -> None:
    """Nothing is fused but the corrections of a quotient, four for each, and only the surrogate is divided
    approximately."""
    codes = compiled(90, torch.bfloat16, 4, tau=3.0, pool=False, decay_input=decay_input)
    assert [each.kernel for each in codes].count("fire_kernel") == 2
    for code in codes:
        # Where the input does not decay, nothing is divided at the first of four steps: the potential is at rest.
        in_charge = (4 if decay_input else 3) * LANES if code.kernel in ("fire_kernel", *BACKWARD) else 0
        assert code.count("fma.rn.f32") == code.count("fma.") == 4 * in_charge, code.kernel
        assert not code.count("div.rn.f32"), code.kernel  # the inverse is a constant
        if code.kernel == "fire_kernel":
            assert not code.count("div.full") and not code.count("div.approx") and not code.count("rcp.")
        if code.kernel in BACKWARD:
            assert code.count("div.full.f32") == 4 * LANES and not code.count("div.approx")


@pytest.mark.parametrize("tau", [1.333, 1.7, 3.0, 1.0000001])
def test_a_corrected_quotient_is_the_quotient(tau: float) -> None:
    """The operations of `divided`, in which extended precision stands for the fused ones."""
    values = np.random.default_rng(0)
    x = (values.standard_normal(10**6) * 10.0 ** values.uniform(-6, 6, 10**6)).astype(np.float32)
    y = np.float32(tau)

    def fused(a, b, c):
        return (a.astype(np.longdouble) * np.longdouble(b) + c).astype(np.float32)

    inverse = np.float32(1) / y
    once = fused(fused(-(x * inverse), y, x), inverse, x * inverse)
    assert np.array_equal(fused(fused(-once, y, x), inverse, once), x / y)


COMPILED = [(80, MANY_STEPS, True), (90, MANY_STEPS, False), (90, MANY_STEPS, True), (90, ENDLESS, False)]


@pytest.mark.parametrize(("capability", "steps", "pool"), COMPILED)
def test_loads_are_wide_registers_suffice_and_the_machine_fuses_nothing(
    capability: int, steps: int, pool: bool
) -> None:
    """With a tau that is a power of two there is no division, which the machine would do with fused operations."""
    from megasnn.kernels.triton.launch import at_once, chunk

    for code in compiled(capability, torch.bfloat16, steps, tau=2.0, pool=pool):
        assert code.stack == 0, f"registers do not suffice for {code.kernel}"
        wide, all_loads = code.count("ld.global.v4.b32"), code.count("ld.global.")
        if code.kernel == "fire_kernel":
            assert "FFMA" not in code.sass and "FMUL" in code.sass
            assert wide == all_loads >= (9 if pool else at_once(steps))
        if code.kernel == "pooled_gradient_kernel":
            assert wide >= 9
        if code.kernel in BACKWARD:
            of_channels = 3 if code.kernel == "backward_sums_kernel" else 0
            assert wide == all_loads - of_channels >= 2 * chunk(torch.bfloat16, steps) + (9 if pool else 0)
        if code.kernel == "statistics_kernel":
            assert wide == all_loads >= 1


MODELS = {  # the largest units of recipes: steps, samples, channels, height and width, whether they pool; tau
    "spikformer-8-512 at 224, stem": (4, (24, 64, 224, 224), True, 2.0),
    "spikformer-8-512 at 224, second convolution": (4, (24, 128, 112, 112), True, 2.0),
    "spikformer-8-512 at 224, block": (4, (24, 2048, 14, 14), False, 2.0),
    "vgg, first convolution": (10, (32, 64, 48, 48), False, 1.333),
}


def test_registers_suffice_for_other_types_and_steps() -> None:
    for case in (
        (86, torch.float32, 16, 2.0, False),
        (89, torch.float64, 16, 2.0, True),
        (80, torch.bfloat16, 13, 2.0, True),
        (80, torch.bfloat16, 10, 1.333, False),
    ):
        for code in compiled(*case):
            assert code.stack == 0, (case, code.kernel)


@pytest.mark.parametrize("name", MODELS)
def test_registers_suffice_for_models(name: str) -> None:
    """Whose sums go through tiles in a loop, where loads are unrolled by four. Behind pooling four values of a thread's
    sums have no register."""
    steps, sizes, pool, tau = MODELS[name]
    for code in compiled(90, torch.bfloat16, steps, tau, pool, decay_input=tau == 2.0, sizes=sizes):
        assert code.stack <= (16 if code.kernel == "backward_sums_kernel" and pool else 0), code.kernel
        if code.kernel == "statistics_kernel":
            assert code.count("ld.global.v4.b32") >= 1 + 4
        if code.kernel == "fold_statistics_kernel":
            assert not code.count("div.s64") and not code.count("rem.s64")


def test_threads_wait_before_they_read_what_others_have_written() -> None:
    """And before they write where others have still to read."""
    (pooled,) = (code for code in compiled(90, torch.bfloat16, 4, 2.0, pool=True) if code.kernel == BACKWARD[0])
    found_again, summed = pooled.memory.split("LSS", 1)  # the values and places that have won a window
    assert found_again.endswith(8 * "L") and summed.startswith("BL")
    assert summed.count("LBS") == 4 and "LS" not in summed  # gradients, each in the place of what has won
    in_loops = [code for code in compiled(90, torch.bfloat16, ENDLESS, 2.0, pool=False) if code.kernel in BACKWARD]
    assert len(in_loops) == 3
    for code in in_loops:  # potentials before each chunk, of five steps
        assert re.fullmatch("[LB]*SSL{5}B.*", code.memory), code.kernel


def test_learned_factors_compile() -> None:
    """Repeated input, running statistics, given potentials and a single channel as well."""
    from megasnn.kernels.triton.neuron import TritonNeuron
    from megasnn.kernels.triton.norm_neuron_launches import mean_gradients_launch

    spec = NeuronSpec("plif", decay_input=False, v_reset=None, detach_reset=False, surrogate="atan")
    w = plif_weight(spec, torch.float32)
    chosen = mock.patch("megasnn.kernels.backends.backend_for", return_value=BACKENDS["triton"])
    with compiling_for(90) as found, chosen:
        x = channels_last(2, 1, 3, 5, dtype=torch.float32).half().requires_grad_()
        v0 = torch.zeros(1, 3, 5, requires_grad=True)
        spikes, v = TritonNeuron(x.shape, x.dtype, spec).multi_step(x, v0, w)
        (spikes.sum() + v.sum()).backward()
        x = channels_last(1, 1, 1, 3, 5, dtype=torch.float64).requires_grad_()
        for running, pool in ((None, True), ((torch.zeros(1), torch.ones(1)), False)):
            norm_pool_neuron(x, BatchNorm(running=running), NormNeuron(spec, 1e-5, pool, 2), w)[0].sum().backward()
        sums = torch.zeros(2, 3, dtype=torch.float64)
        mean_gradients_launch(3, 1e-5, 7)(sums, sums[0], torch.empty(2, 3))
    names = {code.kernel for code in found}
    assert names >= {"fire_kernel", "gradient_kernel", "backward_sums_kernel", "pooled_gradient_kernel"}
    assert names >= {"coefficients_kernel", "mean_gradients_kernel"}
    inexact = "div.full", "div.approx", "rcp."
    assert not any(code.count(each) for code in found for each in inexact if code.kernel == "fire_kernel")


def test_codec_and_generator_compile() -> None:
    from megasnn.kernels.triton import codec, philox

    types = torch.float32, torch.bfloat16, torch.float16, torch.bool
    with compiling_for(90) as found:
        for dtype in types:
            values = torch.zeros(8192).to(dtype)
            packed, _ = codec.launch_pack_bits(values, check=True)
            codec.launch_pack_counts(values, check=True)
            codec.launch_unpack_bits(packed, values.view(1, -1))
        philox.kept_by_kernel(7, torch.tensor([[1], [2]]), 2, *Runs(1, 2**34, 2**34 - 7, 7))
        signed = torch.zeros(8192)
        codec.launch_unpack_ternary(codec.launch_pack_ternary(signed, check=True)[0], signed.view(1, -1))
    assert len(found) == 3 * len(types) + 3
    packing = next(code for code in found if code.kernel == "pack_bits_kernel")
    assert packing.count("ld.global.v4.b32") == packing.count("ld.global.") > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_bispike_compiles_and_fuses_nothing(dtype: torch.dtype) -> None:
    """Loads are wide, nothing is divided, and registers suffice."""
    from megasnn.kernels.triton.neuron import triton_neuron_kernels

    x = torch.empty(4, 8, 32, 32, 64, dtype=dtype, device="meta").movedim(-1, 2).requires_grad_()
    with compiling_for(90) as found:
        spikes, _ = triton_neuron_kernels(x.shape, dtype, NeuronSpec("bispike")).multi_step(x, None, None)
        spikes.backward(spikes.detach())
    assert [code.kernel for code in found] == ["fire_ternary_kernel", "ternary_gradient_kernel"]
    for code in found:
        assert code.stack == 0 and not code.count("fma.") and not code.count("div.") and not code.count("rcp.")
        assert code.count("ld.global.v") >= 1


def test_gpus_that_cannot_be_used_are_told_of() -> None:
    """An old one, and one on which nothing can be compiled."""
    from megasnn.kernels.triton.available import _unusable

    device, broken = torch.device("cuda", 0), RuntimeError("Failed to find C compiler.\nSet CC")
    for capability, named in (((7, 5), "Tesla T4.* 7.5"), ((9, 0), "C compiler. Set CC")):
        with (
            mock.patch("torch.cuda.get_device_capability", lambda device, found=capability: found),
            mock.patch("torch.cuda.get_device_name", lambda device: "Tesla T4"),
            mock.patch("megasnn.kernels.triton.launch.try_out", side_effect=broken),
        ):
            assert re.search(named, _unusable.__wrapped__(device) or "")
