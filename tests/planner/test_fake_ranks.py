"""Bytes that are counted on one process, whose other ranks are fake, are those of real ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from megasnn.grid import ContextCut
from megasnn.models.build import describe
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline.cost_model import LayerCost
from megasnn.pipeline.profile_layers import count_memory
from megasnn.planner.analyze import context_of, counted, trial_sizes
from tests.planner.models import config

MICRO_BATCH = 2


def of_rank(tensor: int, context: int, cut: ContextCut) -> list[list[tuple[LayerCost, ...]]]:
    """What a rank that has others counts, for dense products and with sums over spikes; five times each, since what a
    thread of the transport gives back is not always seen."""
    asked = config(micro_batch=MICRO_BATCH)
    model = describe(asked.model, asked.neuron.spec)
    state = initialize_model_parallel(tp=tensor, device=torch.device("cpu"), cp=context)
    try:
        contexts = [context_of(state, asked, cut, on_cpu) for on_cpu in (False, True)]
        return [[count_memory(model, MICRO_BATCH, each, state.device).layers for _ in range(5)] for each in contexts]
    finally:
        destroy_model_parallel()


@pytest.mark.parametrize(("tensor", "context", "cut"), [(2, 1, "samples"), (1, 2, "samples"), (1, 2, "rows")])
def test_bytes_are_those_of_real_ranks(ranks, tensor: int, context: int, cut: ContextCut) -> None:
    asked = config(micro_batch=MICRO_BATCH)
    both: list[list[tuple[LayerCost, ...]]] = ranks(2, of_rank, tensor, context, cut)[0]
    for real, on_cpu in zip(both, (False, True), strict=True):
        pretended = counted(describe(asked.model, asked.neuron.spec), asked, tensor, context, cut, on_cpu)
        mine = pretended.costs[trial_sizes(asked).index(MICRO_BATCH)]
        assert sum(each.held for each in mine) > 0 and any(each.exchanged for each in mine)
        for layer, theirs in zip(mine, real[0], strict=True):
            for name in ("message", "gradient", "output", "collectives", "exchanged"):
                assert getattr(layer, name) == getattr(theirs, name), name
        assert totals([mine]) == pytest.approx(totals(real), rel=0.05)


def totals(tries: Sequence[Sequence[LayerCost]]) -> list[int]:
    """Bytes of all layers, of each the least of some tries."""
    values = torch.tensor(
        [[(each.held, each.found, each.deferred, *each.working) for each in layers] for layers in tries]
    )
    return values.amin(0).sum(0).tolist()
