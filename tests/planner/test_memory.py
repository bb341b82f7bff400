"""What the planner foresees of a rank's memory is what the run's own forecast says, within 5 %.

Buffers align their tensors, and with ranks that are there a transport keeps some memory for a while.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megasnn.config import OptimizerConfig, PretrainConfig
from megasnn.config.training import Length
from megasnn.engine import Engine
from megasnn.optim.build import state_bytes, working_bytes
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.planner.candidates import Layout, with_layout
from megasnn.planner.predict import Predictor
from megasnn.schedule import ChunkCost
from megasnn.schedule.named import SCHEDULES
from megasnn.training.memory import layer_costs, peak_of
from tests.planner.models import cluster, config, layout, on_cpu

LAYOUTS = {
    "one, always": layout(recompute="always"),
    "data, sharded": layout(dp_replicate=2, shards_optimizer=True),
    "weight": layout(dp_shard=2),
    "tensor": layout(tp=2),
    "context, sharded, always": layout(cp=2, shards_optimizer=True, recompute="always"),
    "zbv": layout(pp=2, schedule="zbv", chunks=2),
}
STATES = "weights", "gathered", "gradients", "optimizer"


def with_lamb() -> PretrainConfig:
    """An optimizer whose step takes memory of its own."""
    return replace(config(), optimizer=OptimizerConfig(optimizer="lamb"))


def of_run(layout: Layout, bounds: tuple[range, ...], costs: tuple[ChunkCost, ...]) -> dict[str, float]:
    """MB of this rank, as a run's forecast counts them.

    Args:
        costs: of the chunks, for schedules whose order depends on them: what a run measures is not the same twice.
    """
    grid = layout.grid
    state = initialize_model_parallel(tp=grid.tp, pp=grid.pp, dp_shard=grid.dp_shard, cp=grid.cp)
    try:
        run = with_layout(with_lamb(), layout, bounds)
        with Engine(run, length=Length(9)) as engine:
            distributed, plan = engine.distributed, engine.plan
            if SCHEDULES[layout.schedule].looks_at_costs:
                plan = replace(plan, schedules=replace(plan.schedules, costs=costs, decided=()))
            peak = peak_of(layer_costs(run, distributed, plan), distributed, plan)
            schedule, shared = plan.schedules.training(plan.micro_batches), plan.schedules.weights
            rank = state.pp.rank
            gathered, buffers = (0, 0) if shared is None else shared.gathered_and_buffers(schedule, rank)
            trained = [entry.tensor for entry in distributed.owned if entry.is_parameter]
            found = {
                "weights": sum(entry.tensor.nbytes for entry in distributed.tensors) + buffers,
                "gathered": gathered,
                "gradients": distributed.gradient_buckets.held_bytes,
                "optimizer": state_bytes(trained, run.optimizer),
                "working": working_bytes(distributed.owned, run.optimizer),
                "peak": peak.kept + peak.working + peak.messages,
            }
        return {name: 1e-6 * value for name, value in found.items()}
    finally:
        destroy_model_parallel()


@pytest.mark.parametrize("name", LAYOUTS)
def test_as_a_run_foresees_it(ranks, name: str) -> None:
    layout = LAYOUTS[name]
    predictor = Predictor(on_cpu(), with_lamb(), cluster(layout.ranks))
    predicted, states = predictor.predict(layout), predictor.states(layout)
    costs = tuple(predictor.costs(layout).of_chunks(predicted.bounds, layout.placement))
    found = ranks(layout.ranks, of_run, layout, predicted.bounds, costs)
    stages = found[:: len(found) // layout.grid.pp]
    for mine, of_rank, theirs in zip(predicted.memory, states, stages, strict=True):
        for part in STATES:
            assert getattr(mine, part) == pytest.approx(theirs[part], rel=0.05), part
        peak = mine.kept + mine.working + mine.messages
        assert peak == pytest.approx(theirs["peak"], rel=0.05)
        assert 1e-6 * of_rank.working == pytest.approx(theirs["working"]) and of_rank.working > of_rank.updated
        assert mine.update == pytest.approx(max(0.0, theirs["working"] - peak - mine.gathered))
