"""Neuron layers on real ranks: local channels only, state carried over or forgotten, against SpikingJelly's nodes."""

from __future__ import annotations

import pytest
import torch
from spikingjelly.activation_based import functional, neuron, surrogate

from megasnn.kernels import NeuronSpec
from megasnn.layers import BuildContext, ConvNormNeuron, ParallelIF, ParallelLIF
from megasnn.parallel.sharding import materialise
from tests.distributed.whole import everybody


def sequence(channels: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return 2 * torch.rand(6, 2, channels, 5, generator=generator, dtype=torch.float64)


def _carried_over_in_two_parts() -> tuple[torch.Tensor, tuple[int, ...]]:
    group = everybody()
    layer = ParallelLIF(NeuronSpec(tau=1.7), BuildContext(group, torch.float64, carries=True))
    x = sequence().chunk(2, dim=2)[group.rank]
    spikes = torch.cat([layer(x[:4]), layer(x[4:])])
    assert layer.v is not None
    held = tuple(layer.v.shape)
    layer.forget()
    assert layer.v is None
    return spikes, held


def test_state_is_local_and_carried_over_until_forgotten(ranks) -> None:
    node = neuron.LIFNode(tau=1.7, surrogate_function=surrogate.Sigmoid(), detach_reset=True, step_mode="m")
    parts = ranks(2, _carried_over_in_two_parts)
    assert torch.equal(torch.cat([spikes for spikes, _ in parts], dim=2), node(sequence()))
    assert all(held == (2, 4, 5) for _, held in parts)


def test_otherwise_every_call_starts_at_rest_and_another_kind_is_refused() -> None:
    layer, node = ParallelIF(NeuronSpec(kind="if"), BuildContext(dtype=torch.float64)), neuron.IFNode(step_mode="m")
    for part in sequence().split(3):
        functional.reset_net(node)
        assert torch.equal(layer(part), node(part))
    assert layer.v is None
    with pytest.raises(ValueError, match="'if'.*'lif'"):
        ParallelIF(NeuronSpec(kind="lif"), BuildContext())


def test_a_unit_takes_a_neuron_that_carries_its_potential_over() -> None:
    """One call on all steps gives what two calls on halves give, with the norm's statistics of evaluation."""
    context = BuildContext(dtype=torch.float64, compute_dtype=torch.float64, carries=True)
    unit = ConvNormNeuron(8, 8, 1, context).eval()
    assert isinstance(unit.neuron, ParallelLIF)
    materialise([("unit", unit)], torch.device("cpu"), 0)
    x = 4 * sequence().unsqueeze(-1)
    whole = unit(x)
    unit.neuron.forget()
    halves = torch.cat([unit(x[:3]), unit(x[3:])])
    assert torch.equal(halves, whole) and 0 < whole.mean() < 1
    unit.neuron.forget()
    assert not torch.equal(unit(x[3:]), whole[3:])
