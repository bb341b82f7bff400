"""The costs file: what is asked of whom, what is counted and measured, and what follows for sizes that were not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal
from unittest.mock import patch

import pytest
import torch

from megasnn.common.grid import ContextCut, Grid
from megasnn.config import ConfigError, PretrainConfig
from megasnn.models.build import building_problems, describe_model
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline.cost_model import LayerCost, LinkCost
from megasnn.pipeline.profile_layers import count_memory
from megasnn.planner.analyze import analyze, context_of, count_layers, counted_sizes, measured, trial_sizes
from megasnn.planner.costs import LayerShare, counted_costs, layer_costs
from megasnn.planner.costs_file import Analysis, Timed
from megasnn.planner.machines import DEVICES
from megasnn.planner.uncomputed import UncomputedConvolutions
from tests.planner.models import analysis, config, text_config

FREE = LinkCost()
SECONDS = 2e-3, 3e-3, 1e-3


def test_refusals_are_those_of_a_run() -> None:
    known, run = analysis(), config()
    (uneven,) = building_problems(run.model, run.neuron.spec, Grid(tp=3))
    assert known.possible["tensor"] == {1: None, 2: None, 3: uneven}
    assert known.possible["samples"] == {2: None, 8: None}
    assert known.possible["rows"][8] == building_problems(run.model, run.neuron.spec, Grid(cp=8), "rows")[0]
    with pytest.raises(ConfigError, match="--embed-dim 33"):
        analyze(replace(run, model=replace(run.model, embed_dim=33)))


def test_what_is_exchanged() -> None:
    """Norms tell each other rank 40 bytes a channel and 8 for each norm, whatever the number of samples."""
    channels = [4, 8, 16, 32, 32, 3 * 32 + 32, 128 + 32]
    few, many = (counted_costs(analysis(), LayerShare(1, 8, "samples", samples, 8)) for samples in (1, 3))
    norms = [1, 1, 1, 1, 1, 2, 2]
    expected = [7 * (40 * count + 8 * number) for count, number in zip(channels, norms, strict=True)]
    assert [cost.exchanged for cost in few[:-1]] == [cost.exchanged for cost in many[:-1]] == expected


def test_tensor_parallel_ranks_keep_less() -> None:
    whole, part = (counted_costs(analysis(), LayerShare(size, 1, "samples", 4, size)) for size in (1, 2))
    assert sum(cost.held for cost in part) < 0.6 * sum(cost.held for cost in whole)
    with pytest.raises(ValueError, match="tensor 3: "):
        counted_costs(analysis(), LayerShare(3, 1, "samples", 4, 3))
    with pytest.raises(ValueError, match="tensor 5"):
        counted_costs(analysis(), LayerShare(5, 1, "samples", 4, 5))


def test_rows_do_not_cut_the_weights_copies() -> None:
    known = analysis()
    alone, rows = (
        replace(each, costs=tuple(tuple(replace(cost, cast=100) for cost in layers) for layers in each.costs))
        for each in (known.alone, known.shared["rows"])
    )
    known = replace(known, alone=alone, shared={"rows": rows}, possible={"rows": {4: None}})
    assert {cost.cast for cost in counted_costs(known, LayerShare(1, 4, "rows", 4, 4))} == {100}


def test_measured_seconds_are_taken_and_scaled() -> None:
    known = analysis()
    count = len(known.layers)
    alone, both = (Timed(4, ranks, (SECONDS,) * count) for ranks in (1, 2))
    slower = replace(both, seconds=((4e-3, 3e-3, 1e-3),) * count)
    timed = replace(known, timed=(alone, slower))
    machine = replace(DEVICES["cpu-core"], least=0.0, start=0.0)
    exact, crowded = (layer_costs(timed, machine, LayerShare(1, 1, "samples", 4, ranks), FREE) for ranks in (1, 2))
    assert [cost.forward for cost in exact] == [2e-3] * count and [cost.forward for cost in crowded] == [4e-3] * count
    twice = layer_costs(timed, machine, LayerShare(1, 1, "samples", 8, 1), FREE)
    assert [cost.forward for cost in twice] == pytest.approx([4e-3] * count, rel=0.05)
    halves = layer_costs(timed, machine, LayerShare(2, 1, "samples", 4, 2), FREE)
    assert all(cost.forward < 4e-3 for cost in halves[:-1])
    waiting = layer_costs(timed, machine, LayerShare(2, 1, "samples", 4, 2), LinkCost(latency=1.0))
    extra = [slower.input_gradient - cost.input_gradient for slower, cost in zip(waiting, halves, strict=True)]
    assert extra == pytest.approx([cost.collectives for cost in waiting])


def measured_here(rank_known: Analysis) -> Analysis:
    import torch.distributed as dist

    run = config()
    return measured(describe_model(run.model, run.neuron.spec), run, rank_known if dist.get_rank() == 0 else None)


def test_two_ranks_measure(ranks) -> None:
    first, second = ranks(2, measured_here, analysis())
    assert first == second and first.machine is not None and first.machine.within.per_byte > 0
    assert [(each.samples, each.ranks) for each in first.timed] == [(4, 1), (4, 2)]
    assert all(forward > 0 for each in first.timed for forward, *_ in each.seconds)


MICRO_BATCH = 2


def asked_by(cut: ContextCut) -> PretrainConfig:
    return text_config(MICRO_BATCH) if cut == "tokens" else config(micro_batch=MICRO_BATCH)


def of_rank(tensor: int, context: int, cut: ContextCut) -> list[list[tuple[LayerCost, ...]]]:
    """What a rank that has others counts, for dense products and with sums over spikes; five times each, since what a
    thread of the transport gives back is not always seen."""
    asked = asked_by(cut)
    model = describe_model(asked.model, asked.neuron.spec)
    state = initialize_model_parallel(tp=tensor, device=torch.device("cpu"), cp=context)
    try:
        for_gpu, for_cpu = (context_of(state, asked, cut, on_cpu) for on_cpu in (False, True))
        with UncomputedConvolutions():
            dense = [count_memory(model, MICRO_BATCH, for_gpu, state.device).layers for _ in range(5)]
        return [dense, [count_memory(model, MICRO_BATCH, for_cpu, state.device).layers for _ in range(5)]]
    finally:
        destroy_model_parallel()


@pytest.mark.parametrize(
    ("tensor", "context", "cut"), [(2, 1, "samples"), (1, 2, "samples"), (1, 2, "rows"), (1, 2, "tokens")]
)
def test_bytes_are_those_of_real_ranks(ranks, tensor: int, context: int, cut: ContextCut) -> None:
    asked = asked_by(cut)
    # The last tokens' rank receives most.
    counting = 1 if cut == "tokens" else 0
    both: list[list[tuple[LayerCost, ...]]] = ranks(2, of_rank, tensor, context, cut)[counting]
    for real, on_cpu in zip(both, (False, True), strict=True):
        pretended = count_layers(describe_model(asked.model, asked.neuron.spec), asked, tensor, context, cut, on_cpu)
        mine = pretended.costs[trial_sizes(asked).index(MICRO_BATCH)]
        assert sum(each.held for each in mine) > 0 and any(each.exchanged for each in mine)
        for layer, theirs in zip(mine, real[0], strict=True):
            for name in ("message", "gradient", "output", "collectives", "exchanged"):
                assert getattr(layer, name) == getattr(theirs, name), name
        assert totals([mine]) == pytest.approx(totals(real), rel=0.05)


@pytest.mark.parametrize("attention", ["softmax", "spiking"])
def test_ranks_that_divide_tokens_between_the_counted_numbers(attention: Literal["softmax", "spiking"]) -> None:
    """Keys and values come to all tokens but the own; states come from each other rank, whatever its tokens."""
    asked = text_config(MICRO_BATCH)
    asked = replace(asked, model=replace(asked.model, attention=attention, positions="learned"))
    model = describe_model(asked.model, asked.neuron.spec)
    with patch.multiple("megasnn.planner.analyze", TENSOR_SIZES=(1,), CONTEXT_SIZES=(2, 4, 8, 16)):
        known = counted_sizes(model, asked)
    predicted = counted_costs(known, LayerShare(1, 4, "tokens", MICRO_BATCH, 4))
    counted = count_layers(model, asked, 1, 4, "tokens").costs[trial_sizes(asked).index(MICRO_BATCH)]
    assert any(each.exchanged for each in counted)
    for each, expected in zip(predicted, counted, strict=True):
        for name in ("message", "gradient", "output", "found", "collectives", "exchanged"):
            assert getattr(each, name) == getattr(expected, name), name
    assert totals([predicted]) == pytest.approx(totals([counted]), rel=0.1)
    with pytest.raises(ValueError, match="context by tokens 4: .* 2 ranks; make it anew"):
        counted_costs(replace(known, larger={}), LayerShare(1, 4, "tokens", MICRO_BATCH, 4))


def totals(tries: Sequence[Sequence[LayerCost]]) -> list[int]:
    """Bytes of all layers, of each the least of some tries."""
    values = torch.tensor(
        [[(each.held, each.found, each.deferred, *each.working) for each in layers] for layers in tries]
    )
    return values.amin(0).sum(0).tolist()
