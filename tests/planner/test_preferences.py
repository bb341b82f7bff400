"""What plans prefer, found again on ranks that take a step: a smaller peak, and room for larger micro-batches."""

from __future__ import annotations

from dataclasses import replace

from megasnn.config import PretrainConfig
from megasnn.config.training import Length
from megasnn.engine import Engine
from megasnn.optim.build import held_state_bytes
from megasnn.planner.candidates import Layout, Prefer, with_layout
from megasnn.planner.plan import Plan, plan
from tests.planner.models import analysis, cluster, config
from tools.benchmark.steps import needed_bytes, random_batch

RANKS = 2


def planned(prefer: Prefer, asked: PretrainConfig, bytes_of_rank: float) -> Plan:
    where = cluster(RANKS)
    return plan(analysis(), asked, replace(where, machine=replace(where.machine, memory=bytes_of_rank)), prefer)


def bytes_of_step(samples: int, micro_batch: int, layout: Layout, bounds: tuple[range, ...]) -> int:
    """That this rank needs at most, weights, gradients and optimizer state included."""
    asked = with_layout(config(samples, micro_batch), layout, bounds)
    with Engine(asked, length=Length(9)) as engine:
        batch = random_batch(asked.model, samples)  # type: ignore[arg-type]
        engine.train_step(*batch)
        # What a thread of the transport gives back is not always seen.
        peak = min(needed_bytes(lambda: engine.train_step(*batch), engine.state.device) for _ in range(3))
        weights = sum(entry.tensor.nbytes for entry in engine.distributed.tensors)
        return peak + weights + engine.distributed.data_parallel.held_bytes + held_state_bytes(engine.optimizer)


def on_ranks(ranks, found: Plan, samples: int = 16, micro_batch: int = 4) -> int:
    """Of the rank that needs most on the layout of a plan."""
    return max(ranks(found.layout.ranks, bytes_of_step, samples, micro_batch, found.layout, found.predicted.bounds))


def test_memory_takes_less_than_speed(ranks) -> None:
    asked = config()
    fast, small = (planned(prefer, asked, 1e12) for prefer in ("speed", "memory"))
    assert on_ranks(ranks, small) < 0.8 * on_ranks(ranks, fast)


def test_capacity_takes_larger_micro_batches_than_speed(ranks) -> None:
    asked = config(samples=64, micro_batch=4)
    program = cluster().machine.program
    limit = program + 4e6
    fast, roomy = (planned(prefer, asked, limit) for prefer in ("speed", "capacity"))
    assert roomy.largest_micro_batch >= 2 * fast.largest_micro_batch
    size = roomy.largest_micro_batch
    assert program + on_ranks(ranks, roomy, 4 * size, size) <= 1.05 * limit
    assert program + on_ranks(ranks, fast, 4 * size, size) > limit
