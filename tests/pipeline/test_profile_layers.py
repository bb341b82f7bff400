"""Costs of layers and links, as they are measured."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from megasnn.kernels import NeuronSpec
from megasnn.layers import BuildContext
from megasnn.models.build import describe_model
from megasnn.models.spikformer.model import Spikformer
from megasnn.parallel_state import Group, destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline import profile_layers
from megasnn.pipeline.cost_model import LayerCost, LinkCost, PipelineCosts
from tests.parity.ranks import model_config

MODEL = describe_model(model_config(), NeuronSpec())
CPU = torch.device("cpu")


def profiled(samples: int, rounds: int = 1) -> list[LayerCost]:
    return profile_layers.profile_layers(MODEL, samples, BuildContext(), CPU, rounds)


def test_costs_of_a_layer_are_what_it_does() -> None:
    state = torch.random.get_rng_state()
    four, eight = profiled(4), profiled(8)
    assert torch.equal(state, torch.random.get_rng_state()), "training's own randomness has not moved"
    assert len(four) == len(eight) == len(MODEL.layers)
    assert all(min(cost.forward, cost.input_gradient, cost.weight_gradient) > 0 for cost in four)
    assert [cost.gradient for cost in eight] == [2 * cost.gradient for cost in four]
    # Nothing that a layer keeps for backward grows with less than the samples, but for the norms' statistics.
    assert all(1.9 * a.held < b.held < 2.05 * a.held for a, b in zip(four, eight, strict=True))
    stem, block = four[0], four[5]
    assert stem.message == stem.gradient // 32  # a bit in place of a float32
    assert block.message == block.gradient // 4
    assert all((cost.collectives, cost.exchanged) == (0, 0) for cost in four)


def test_layers_that_are_built_alike_are_profiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Spikformer(embed_dim=32, depth=4, num_heads=4, image_size=16, in_channels=1, time_steps=2)
    model, made = describe_model(config), []
    materialise = profile_layers.materialise
    monkeypatch.setattr(profile_layers, "materialise", lambda *given, **more: made.append(materialise(*given, **more)))
    found = profile_layers.count_memory(model, 2, BuildContext(), CPU).layers
    assert len(found) == len(model.layers) and len(made) == len(model.layers) - 2 * 3
    held = {layer.name: cost.held for layer, cost in zip(model.layers, found, strict=True)}
    assert held["blocks.0.attention"] == held["blocks.3.attention"] > held["head"]


def test_bytes_of_many_samples_are_counted_with_few() -> None:
    one, few, many = (profile_layers.count_memory(MODEL, samples, BuildContext(), CPU).layers for samples in (2, 7, 12))
    for first, second, third in zip(one, few, many, strict=True):
        assert third.held - second.held == second.held - first.held > 0 and third.gradient == 6 * first.gradient


def _profiled_in_a_group(tensor: int, context: int) -> list[LayerCost]:
    state = initialize_model_parallel(tp=tensor, cp=context)
    try:
        built = BuildContext(state, context_cut="rows")
        return profile_layers.profile_layers(MODEL, 4, built, CPU, 1)
    finally:
        destroy_model_parallel()


def test_a_layer_costs_its_rank_what_its_own_part_costs(ranks) -> None:
    """All but the head give half of their channels, or of their rows, to the next stage."""
    whole = profiled(4)
    for tensor, context in ((2, 1), (1, 2)):
        for mine in ranks(2, _profiled_in_a_group, tensor, context):
            assert [2 * cost.gradient for cost in mine[:-1]] == [cost.gradient for cost in whole[:-1]]
            assert all(cost.held < 0.8 * of_all.held for cost, of_all in zip(mine[:-1], whole[:-1], strict=True))
            if tensor == 2:
                # The second layer's input is gathered, a bit a spike, and its gradient of the same size summed.
                bits, gradient = whole[0].message // 2, whole[0].gradient // 2
                assert mine[1].collectives == 2
                assert bits + gradient // 2 <= mine[1].exchanged <= bits + 2 * gradient
            else:
                assert all(min(cost.collectives, cost.exchanged) > 0 for cost in mine)


def test_costs_of_chunks_are_sums() -> None:
    costs = PipelineCosts((LayerCost(1.0, 2.0, 3.0, message=100, gradient=400),) * 3, LinkCost(0.125, 0.01))
    first, last = costs.of_chunks([range(0, 2), range(2, 3)], (0, 1))
    assert (first.forward, first.backward, last.input_gradient, last.weight_gradient) == (2, 10, 2, 3)
    assert (first.transfer, first.transfer_back) == pytest.approx((0.125 + 1.0, 0.125 + 4.0))
    (again, _) = costs.of_chunks([range(0, 2), range(2, 3)], (0, 1), recomputes=True)
    assert (again.input_gradient, again.weight_gradient) == (6, 6), "forwards that are computed again come before it"


@pytest.mark.parametrize(
    ("least_small", "per_byte"), [(1.0, 4.0), (6.0, 5.0)], ids=["few held up", "all small ones held up"]
)
def test_a_busy_machine_hides_no_cost_of_a_byte(monkeypatch, least_small: float, per_byte: float) -> None:
    """Most of the messages are held up, the small ones longer than the large ones."""
    small, large = [9.0] * 7 + [least_small] * 2, [8.0] * 7 + [5.0] * 2
    marks = chain.from_iterable((0.0, each) for pair in zip(small, large, strict=True) for each in pair)
    monkeypatch.setattr(profile_layers, "now", lambda device: next(marks))
    monkeypatch.setattr(profile_layers, "_transfer", lambda *_, sends=True: None)
    found = profile_layers.measure_link(Group("pp", (0, 1)), CPU)
    assert found == LinkCost(least_small / 2, per_byte / profile_layers.LARGE)
