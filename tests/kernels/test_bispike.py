"""The elastic bi-spiking neuron: SpikingJelly's values, gradients written with detach, equal bits of the backends."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megasnn.config import ConfigError, parse, validate
from megasnn.kernels import BACKENDS, NeuronSpec
from megasnn.kernels.neuron import neuron_multi_step
from megasnn.kernels.norm_neuron import BatchNorm, NormNeuron, norm_pool_neuron
from megasnn.kernels.spike_codec import SPIKES, TERNARY, bits_of, pack_ternary
from megasnn.layers import BuildContext, ConvNormNeuron, SpikingSelfAttention
from megasnn.layers.neuron import make_neuron
from megasnn.layers.shape_inference import content_of
from megasnn.models.model import run_config
from megasnn.models.spikformer.model import Spikformer
from megasnn.telemetry.operations import OperationCounter
from megasnn.telemetry.spikes import SpikeRecorder
from tests.kernels.models import assert_close, channels_last, gradients, neuron_results

SPEC = NeuronSpec("bispike")
USABLE = [name for name, each in BACKENDS.items() if name != "triton" and not each.lacks("bispike", "sigmoid")]

# Values of `_ElasticBiSpike` in SpikingJelly's repository (benchmark/snn_llm/spikelm.py, commit 2ec62908), which is not
# in its package, run in float64: (inputs, amplitudes, spikes, last m, gradients of the inputs). The gradients of the
# spikes of step t are 2^t.
ABOVE = 1 + 2**-52
TIES = [1.0, -1.0, 0.5, -0.5, 0.5 * ABOVE, -0.5 * ABOVE, ABOVE, -ABOVE, 0.0, -0.0, -0.25, 0.75, -3.0]
TIES_OF_3_4 = [0.75, -0.75, 0.375, -0.375, 0.375 * ABOVE, -0.375 * ABOVE, 0.75 * ABOVE, -0.75 * ABOVE, 0.0, -0.0]
FOUR_STEPS = [
    [0.75, -0.75, 0.25, -1.5, 1.5],
    [0.0, 0.0, 0.5, 0.25, 0.125],
    [0.5, -0.25, -1.0, -0.125, 0.375],
    [-0.5, 1.0, 0.25, 1.0, -0.625],
]
TABLE: dict[str, tuple[list[list[float]], list[float], list[list[float]], list[float], list[list[float]]]] = {
    "ties and ends": (
        [TIES],
        [1.0],
        [[1, -1, 0, 0, 1, -1, 1, -1, 0, 0, 0, 1, -1]],
        TIES,
        [[1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0]],
    ),
    "ties and ends of 0.75": (
        [TIES_OF_3_4],
        [0.75],
        [[0.75, -0.75, 0, 0, 0.75, -0.75, 0.75, -0.75, 0, 0]],
        TIES_OF_3_4,
        [[1, 1, 1, 1, 1, 1, 0, 0, 1, 1]],
    ),
    "four steps": (
        FOUR_STEPS,
        [1.0, 1.0, 1.0, 1.0],
        [[1, -1, 0, -1, 1], [0, 0, 1, 0, 0], [0, 0, -1, 0, 0], [0, 1, 0, 1, -1]],
        [-0.375, 0.9140625, -0.25, 0.9375, -0.5234375],
        [[1, 2.75, 1.5, 1.75, 0], [3.5, 3.5, 2, 3.5, 3.5], [6, 6, 8, 6, 6], [8, 8, 8, 8, 8]],
    ),
    "four amplitudes": (
        FOUR_STEPS,
        [1.0, 0.5, 2.0, 0.75],
        [[1, -1, 0, -1, 1], [0, -0.5, 0.5, -0.5, 0], [0, 0, 0, 0, 0], [0, 0.75, 0, 0.75, -0.75]],
        [-0.25, 0.828125, -0.25, 0.875, -0.4296875],
        [[1, 2.5, 1, 1.5, 0], [3, 3, 0, 3, 3], [8, 4, 8, 4, 8], [8, 0, 8, 0, 8]],
    ),
}


@pytest.mark.parametrize("backend", USABLE)
@pytest.mark.parametrize("name", TABLE)
def test_equals_spikingjelly(name: str, backend: str) -> None:
    inputs, amplitudes, spikes, last, wanted = TABLE[name]
    # Repeated, so that kernels compute several values at once, and one by one what is left over.
    x = torch.tensor(inputs, dtype=torch.float64).repeat(1, 5)[:, None, :, None].requires_grad_()
    amplitude = torch.tensor(amplitudes, dtype=torch.float64)
    units, v = neuron_multi_step(x, SPEC, w=amplitude, backend=backend)
    of_steps = amplitude.view(-1, 1, 1, 1)
    found = units * of_steps
    assert found[:, 0, :, 0].tolist() == [each * 5 for each in spikes]
    assert not torch.signbit(found[found == 0]).any()
    carried = 0.25 * torch.tensor(last, dtype=torch.float64) * (amplitudes[-1] - torch.tensor(spikes[-1]))
    assert torch.equal(v[0, :, 0], carried.repeat(5))
    upstream = (2.0 ** torch.arange(len(x))).view(-1, 1, 1, 1).expand_as(found).double()
    (gradient,) = torch.autograd.grad(found, x, upstream)
    assert torch.allclose(gradient[:, 0, :, 0], torch.tensor(wanted).double().repeat(1, 5), rtol=1e-15, atol=0)


def written_with_detach(x: Tensor, amplitude: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Unit spikes and last potential, from torch's own gradients."""
    spikes = []
    for current, a in zip(x, amplitude, strict=True):
        m = v + current
        clipped = (m / a).clamp(-1, 1)
        spike = clipped + (clipped.round() - clipped).detach()
        v = 0.25 * m * (a - a * spike.detach())
        spikes.append(spike)
    return torch.stack(spikes), v


@pytest.mark.parametrize("backend", USABLE)
def test_gradients(backend: str) -> None:
    x = channels_last(6, 2, 7, 5).requires_grad_()
    v0 = channels_last(1, 2, 7, 5, seed=1)[0].requires_grad_()
    for amplitude in (torch.ones(6).double(), torch.rand(6, generator=torch.Generator().manual_seed(0)).double() + 0.2):
        expected, last = written_with_detach(x, amplitude, v0)
        spikes, v = neuron_multi_step(x, SPEC, v0, amplitude, backend)
        assert torch.equal(spikes, expected) and torch.equal(v, last)
        assert all(0.1 < (spikes == each).double().mean() < 0.8 for each in (-1, 0, 1))
        for found, wanted in zip(gradients(spikes, [x, v0], v), gradients(expected, [x, v0], last), strict=True):
            assert_close(found, wanted, 1e-14)


def test_the_threshold_is_the_amplitude() -> None:
    x = channels_last(4, 2, 8, 3).requires_grad_()
    amplitude = torch.full((4,), 0.7, dtype=torch.float64)
    for backend in USABLE:
        found = neuron_results(x, NeuronSpec("bispike", v_threshold=0.7), backend)
        spikes, v = neuron_multi_step(x, SPEC, w=amplitude, backend=backend)
        assert all(map(torch.equal, found, [spikes, v, *gradients(spikes, [x], v)]))
    with pytest.raises(ValueError, match="3 amplitudes for 4 time steps"):
        neuron_multi_step(x, SPEC, w=torch.ones(3))


def test_spikes_leave_packed_with_their_content() -> None:
    for backend in USABLE:
        for channels, space in ((8, (3,)), (3, (5,)), (24, (5, 5))):
            x = channels_last(4, 1, channels, *space).requires_grad_()
            spikes, _ = neuron_multi_step(x, SPEC, backend=backend)
            assert torch.equal(bits_of(spikes, TERNARY), pack_ternary(spikes, check=True))
            assert bits_of(spikes, SPIKES) is None and spikes.movedim(2, -1).is_contiguous()
            with torch.no_grad():
                assert bits_of(neuron_multi_step(x, SPEC, backend=backend)[0], TERNARY) is None


def test_backward_keeps_three_bits_a_value_and_no_input() -> None:
    """Two of them are the packed spikes, which the next product keeps too: in the same memory."""
    x = channels_last(4, 2, 16, 5).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        saved = list[Tensor]()
        spikes, _ = neuron_multi_step(x, SPEC, backend="fused")
    bits = bits_of(spikes, TERNARY)
    sizes = {(each.dtype, each.numel()) for each in saved}
    assert sizes == {(torch.uint8, x.numel() // 4), (torch.uint8, x.numel() // 8), (torch.float64, len(x))}
    assert bits is not None and any(each.data_ptr() == bits.data_ptr() for each in saved)


def test_windows_go_on_from_the_potential_that_is_carried() -> None:
    x = channels_last(6, 2, 8, 3)
    layer = make_neuron(SPEC, BuildContext(time_steps=3, stateful=True))
    windows = [layer(part) for part in x.split(3)]
    assert torch.equal(torch.cat(windows), neuron_multi_step(x, SPEC)[0])
    layer.forget()
    assert torch.equal(layer(x[:3]), windows[0]) and not torch.equal(windows[1], neuron_multi_step(x[3:], SPEC)[0])


def test_bfloat16_computes_in_float32() -> None:
    for backend in USABLE:
        x = channels_last(5, 2, 7, 3, dtype=torch.float32).bfloat16().requires_grad_()
        whole = x.detach().float().requires_grad_()
        spikes, v = neuron_multi_step(x, SPEC, backend=backend)
        expected, last = neuron_multi_step(whole, SPEC, backend=backend)
        assert spikes.dtype == torch.bfloat16 and torch.equal(spikes.float(), expected) and torch.equal(v, last)
        (found,) = gradients(spikes, [x])
        assert torch.equal(found, gradients(expected, [whole])[0].bfloat16())


def test_a_potential_that_is_no_number_does_not_fire() -> None:
    for backend in USABLE:
        x = torch.tensor([[math.nan, math.inf, -math.inf, 1e30]], requires_grad=True)
        spikes, _ = neuron_multi_step(x, SPEC, backend=backend)
        assert spikes.tolist() == [[0, 1, -1, 1]]
        assert torch.autograd.grad(spikes.sum(), x)[0].tolist() == [[0, 0, 0, 0]]


def test_the_dry_run_and_the_statistics_know_of_negative_spikes() -> None:
    neuron = make_neuron(SPEC, BuildContext())
    assert content_of(neuron(torch.empty(2, 3, 4, device="meta"))) is TERNARY
    recorder = SpikeRecorder()
    recorder.enabled = True
    values = torch.tensor([[[1.0, -1.0, 0.0]], [[-1.0, 1.0, 0.0]]])
    recorder.observe("layer", values)
    (layer,) = recorder.reduce(None, ())
    assert (layer.firing_rate, layer.silent, layer.saturated) == (2 / 3, 1 / 3, 2 / 3)
    counter = OperationCounter()
    counter.observe("layer", values.view(2, 3, 1, 1), lambda space: torch.full((1, 1), 5.0))
    assert counter.take()["layer"] == (20.0, True)


def problems(flags: str) -> list[str]:
    try:
        validate(parse(run_config(Spikformer), ["--train-iters", "1", *flags.split()]), 1)
    except ConfigError as error:
        return list(error.problems)
    return []


def test_refuses_what_it_has_no_use_for() -> None:
    for flags, named in (
        ("--neuron bispike --tau 3", ("--tau 3", "--tau 2.0")),
        ("--neuron bispike --v-reset none --no-decay-input", ("--v-reset none", "--no-decay-input")),
        ("--neuron bispike --no-detach-reset", ("--no-detach-reset",)),
        ("--neuron bispike --surrogate atan", ("--surrogate atan",)),
        ("--neuron bispike --surrogate-alpha 3", ("--surrogate-alpha 3",)),
    ):
        found = problems(flags)
        assert len(found) == 1 and all(name in found[0] for name in named), (flags, found)
    with pytest.raises(ValueError, match="--v-threshold 0.0"):
        NeuronSpec("bispike", v_threshold=0.0)
    with pytest.raises(ValueError, match="make_neuron"):
        norm_pool_neuron(torch.rand(2, 1, 3, 4), BatchNorm(), NormNeuron(SPEC, 1e-5, False, 2))
    with pytest.raises(ValueError, match="bispike.*SpikingSelfAttention"):
        SpikingSelfAttention(8, 2, BuildContext(neuron=SPEC))


def test_behind_a_norm_it_is_a_layer_of_its_own() -> None:
    options: dict[str, Any] = {"neuron": SPEC}
    unit = ConvNormNeuron(4, 8, 3, **options)
    assert not unit.is_fused and unit.neuron.lowest == -1
