"""Integer LIF: whole numbers from 0 to D in place of spikes, as SpikingJelly's I-LIF gives them, and bits nowhere."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from spikingjelly.activation_based import functional, surrogate
from torch import Tensor

from megasnn.config import ConfigError, parse, validate
from megasnn.kernels import BACKENDS, NeuronSpec
from megasnn.kernels.neuron import neuron_multi_step
from megasnn.kernels.norm_neuron import BatchNorm, NormNeuron, norm_pool_neuron
from megasnn.kernels.spike_codec import bits_of, pack_counts
from megasnn.layers import (
    BuildContext,
    Numerics,
    ParallelNeuron,
    SpikeDrivenAttention,
    SpikingSelfAttention,
    TokenAttention,
)
from megasnn.layers.shape_inference import content_of
from megasnn.models.model import run_config
from megasnn.models.spikformer.model import Spikformer
from megasnn.telemetry.spikes import SpikeRecorder
from tests.kernels.models import assert_close, channels_last, gradients


def counting(most: int, **options: Any) -> NeuronSpec:
    return NeuronSpec(f"ilif{most}", **{"tau": 4 / 3, "v_reset": None, "decay_input": False, **options})


def spikingjelly(x: Tensor, most: int, spec: NeuronSpec) -> tuple[Tensor, Tensor]:
    """Counts and last potential, in float64, in which it takes its reference."""
    count = surrogate.MultiLevelSpikeCount(most)
    values = spec.tau, spec.v_threshold, count, spec.detach_reset
    counts, v, _ = functional.ilif_multi_step(x, torch.zeros_like(x[0]), *values)
    return counts, v


@pytest.mark.parametrize(
    ("most", "options"),
    [
        (4, {}),
        (4, {"detach_reset": False}),
        (8, {"tau": 3.0, "v_threshold": 0.3, "detach_reset": False}),
        (1, {"v_threshold": 0.7}),
    ],
)
def test_equals_spikingjelly(most: int, options: dict[str, Any]) -> None:
    spec = counting(most, **options)
    x = (channels_last(6, 2, 7, 3, 3) * (1 + most) * spec.v_threshold).requires_grad_()
    expected, last = spikingjelly(x, most, spec)
    counts, v = neuron_multi_step(x, spec)
    assert set(counts.unique().tolist()) == set(range(most + 1)) and spec.largest == most
    assert torch.equal(counts, expected) and (v - last).abs().max() < 1e-12
    assert (gradients(counts, [x], v)[0] - gradients(expected, [x], last)[0]).abs().max() < 1e-12


def test_halves_are_rounded_to_even_and_the_ends_have_a_gradient() -> None:
    x = torch.tensor([[-0.1, -0.0, 0.0, 0.5, 1.5, 2.5, 3.5, 4.0, 4.1]], dtype=torch.float64, requires_grad=True)
    spec = counting(4)
    (counts, _), (expected, _) = neuron_multi_step(x, spec), spikingjelly(x, 4, spec)
    assert counts.tolist() == expected.tolist() == [[0, 0, 0, 0, 2, 2, 4, 4, 4]]
    found, theirs = (torch.autograd.grad(each.sum(), x)[0] for each in (counts, expected))
    assert found.tolist() == theirs.tolist() == [[0, 1, 1, 1, 1, 1, 1, 1, 0]]
    assert pack_counts(counts, check=True).tolist() == [0, 0, 0, 0, 2, 2, 4, 4, 4]  # -0 is refused


def test_a_unit_is_norm_pooling_and_neuron_and_nothing_is_kept_as_bits() -> None:
    spec, norm = counting(4, detach_reset=False), torch.nn.BatchNorm2d(5).double()
    x = (channels_last(3, 2, 5, 6, 6) + 1).requires_grad_()
    pooled = torch.nn.functional.max_pool2d(norm(x.flatten(0, 1)) * 2, 3, 2, 1).unflatten(0, (3, 2))
    expected, _ = spikingjelly(pooled, 4, spec)
    two = torch.full((5,), 2.0, dtype=torch.float64)
    counts = norm_pool_neuron(x, BatchNorm(two), NormNeuron(spec, 1e-5, True, 3)).spikes
    assert torch.equal(counts, expected) and counts.max() > 1 and bits_of(counts) is None
    assert_close(*(gradients(each, [x])[0] for each in (counts, expected)))
    alone, _ = neuron_multi_step(3 * x, spec)
    assert alone.max() > 1 and bits_of(alone) is None
    assert bits_of(neuron_multi_step(x, counting(1))[0]) is not None  # which fires 0 or 1


def test_bfloat16_holds_counts_and_the_potential_goes_on_in_float32() -> None:
    x = (channels_last(5, 2, 7, 3, 3) * 4).bfloat16()
    counts, v = neuron_multi_step(x, counting(8))
    expected, last = neuron_multi_step(x.float(), counting(8))
    assert counts.dtype == torch.bfloat16 and torch.equal(counts.float(), expected) and torch.equal(v, last)


def test_the_dry_run_and_the_statistics_know_of_counts() -> None:
    neuron = ParallelNeuron(counting(4), BuildContext(numerics=Numerics(neuron_backend="torch")))
    assert content_of(neuron(torch.empty(2, 3, 4, device="meta"))).value == "counts"
    recorder = SpikeRecorder()
    recorder.enabled = True
    recorder.observe("layer", torch.tensor([[[4.0, 1.0, 0.0]], [[2.0, 0.0, 0.0]]]))
    (layer,) = recorder.reduce(None, ())
    assert (layer.firing_rate, layer.silent, layer.saturated) == (7 / 6, 1 / 3, 1 / 3)


def test_attention_which_keeps_bits_refuses_counts() -> None:
    for most in (1, 2):
        context = BuildContext(neuron=counting(most))
        for attention in (
            partial(SpikingSelfAttention, 8, 2),
            partial(TokenAttention, 8, 2),
            partial(SpikeDrivenAttention, 8),
        ):
            with pytest.raises(ValueError, match=f"ilif2.*{attention.func.__name__}") if most > 1 else nullcontext():
                attention(context)


def problems(flags: str) -> list[str]:
    try:
        validate(parse(run_config(Spikformer), ["--train-iters", "1", *flags.split()]), 1)
    except ConfigError as error:
        return list(error.problems)
    return []


SOUND = "--neuron ilif4 --v-reset none --no-decay-input "


def test_refuses_what_it_has_no_use_for() -> None:
    assert problems(SOUND) == problems(SOUND + "--tau 1.25 --no-detach-reset") == []
    for flags, named in (
        ("--neuron ilif4 --no-decay-input", ("--v-reset 0.0", "--v-reset none")),
        ("--neuron ilif4 --v-reset none", ("--decay-input", "--no-decay-input")),
        (SOUND + "--surrogate atan", ("--surrogate atan",)),
        (SOUND + "--surrogate-alpha 3", ("--surrogate-alpha 3",)),
        (SOUND + "--tau 1", ("--tau 1",)),
        (SOUND + "--neuron-backend fused", ("--neuron-backend fused", "ilif4")),
        ("--neuron psn --tau 3 --v-reset none", ("--tau 3", "--v-reset none", "--tau 2.0", "--v-reset 0.0")),
        ("--neuron sliding_psn --no-detach-reset", ("--no-detach-reset",)),
        ("--neuron psn --neuron-backend triton", ("--neuron-backend triton", "psn")),
    ):
        found = problems(flags)
        assert len(found) == 1 and all(name in found[0] for name in named), (flags, found)
    with pytest.raises(ValueError, match="ilif9"):
        counting(9)
    with pytest.raises(ValueError, match="psn"):
        neuron_multi_step(torch.rand(2, 3), NeuronSpec("psn"))
    for name in ("ilif4", "psn", "sliding_psn"):
        assert [each for each, backend in BACKENDS.items() if backend.lacks(name, "sigmoid") is None] == ["torch"]
