"""`plan`: which layout to take on a cluster, and why none of the others. Reads a costs file, and needs no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args

from megasnn.batching import advised_size
from megasnn.config import ConfigError, PretrainConfig
from megasnn.config.checks import flag
from megasnn.config.parallel import ParallelConfig
from megasnn.planner.analysis import Analysis, whose
from megasnn.planner.candidates import Candidate, Prefer
from megasnn.planner.cluster import Cluster, counts, node_problems
from megasnn.planner.layout import Layout
from megasnn.planner.predicted import Predicted
from megasnn.planner.search import PlanError, Search, layouts

SIMULATIONS, SECONDS = 20, 20.0
SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "weight_parallel_size",
)
DECIDED = ("--memory-budget", "--pipeline-model-parallel-layout", "--layer-costs")

_ANEW = "; --costs with a file that is not there does"  # one that is there is read


@dataclass(frozen=True)
class Plan:
    """What to do, and why.

    Attributes:
        layout: the one to take. predicted: its step.
        bytes: that its largest rank needs, with what an allocator keeps. largest_micro_batch: samples of the largest
            micro-batch that would fit.
        candidates: all that were looked at, the one that was taken first, then the others from the best one on.
        simulated: how many of them were simulated. seconds: that planning took.
        advice: what would help and is not the planner's to change. warnings: what makes the figures doubtful.
    """

    layout: Layout
    predicted: Predicted
    bytes: float
    largest_micro_batch: int
    cluster: Cluster
    prefer: Prefer
    micro_batches: int
    candidates: tuple[Candidate, ...]
    simulated: int
    seconds: float
    advice: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def bounds(self) -> tuple[range, ...]:
        """The layers of each chunk."""
        return self.predicted.bounds


def plan(
    analysis: Analysis,
    config: PretrainConfig,
    cluster: Cluster,
    prefer: Prefer = "speed",
    simulations: int = SIMULATIONS,
    seconds: float = SECONDS,
) -> Plan:
    """Looks at all layouts by bounds, and simulates the best of them.

    Sizes and number of micro-batches are those of the configuration: they define what is computed. Flags of layouts
    that it gives are kept: only layouts with these are looked at.

    Args:
        prefer: the fastest step; the smallest peak of a rank's memory; or room for the largest micro-batches.
        simulations: at most. seconds: for them.
    Raises:
        ConfigError: what no layout can be right for. PlanError: costs of another model, or no layout that fits.
    """
    begin = time.monotonic()
    if prefer not in get_args(Prefer):
        raise ValueError(f"prefer={prefer!r} is none of {', '.join(get_args(Prefer))}")
    if wrong := problems(config, cluster.ranks, cluster.ranks_of_node):
        raise ConfigError(wrong)
    _check(analysis, config)
    if analysis.machine is not None and _is_of_another(analysis, cluster):
        analysis = replace(analysis, timed=())  # seconds of one device say nothing of another
    search = Search(analysis, config, cluster, prefer)
    looked_at = search.all_looked_at(layouts(analysis, config, cluster, search.may_be_best))
    chosen, predicted, looked_at, simulated = search.best(
        looked_at, simulations, max(begin + seconds, time.monotonic() + seconds / 2)
    )
    rest = sorted((each for each in looked_at if each.layout != chosen.layout), key=search.rank)
    return Plan(
        layout=chosen.layout,
        predicted=predicted,
        bytes=chosen.bytes or 0.0,
        largest_micro_batch=search.largest_micro_batch(chosen),
        cluster=cluster,
        prefer=prefer,
        micro_batches=chosen.layout.micro_batches(config.training.micro_batches),
        candidates=(chosen, *(search.with_reason(each, chosen) for each in rest)),
        simulated=simulated,
        seconds=time.monotonic() - begin,
        advice=tuple(_advice(config, chosen.layout, cluster)),
        warnings=tuple(_warnings(analysis, config, cluster)),
    )


def _check(analysis: Analysis, config: PretrainConfig) -> None:
    if (other := whose(analysis, config)) is not None:
        raise PlanError(f"these are costs {other}; analyze this one{_ANEW}")
    asked = config.parallel
    for name, size, known in (
        ("tensor_model_parallel_size", asked.tensor_model_parallel_size, {1, *analysis.possible("tensor")}),
        ("context_parallel_size", asked.context_parallel_size, {1, *analysis.possible("samples")}),
    ):
        if size not in known:
            told = ", ".join(map(str, sorted(known)))
            missing = f"{flag(name)} {size} is not in the costs, which have {told}"
            raise PlanError(f"{missing}: analyze with that flag{_ANEW}")


def _is_of_another(analysis: Analysis, cluster: Cluster) -> bool:
    """Whether layers were not measured on the device that a plan is for."""
    return analysis.machine is None or analysis.machine.name != cluster.machine.name


def problems(config: PretrainConfig, ranks: int, ranks_of_node: int) -> list[str]:
    """What no layout can be right for, and what the planner does not plan; needs no costs."""
    training = config.training
    wrong = node_problems(ranks, ranks_of_node) or _size_problems(config.parallel, ranks, ranks_of_node)
    parts = config.neuron, training, config.optimizer, config.data, config.checkpoint, config.logging
    return wrong + _not_planned(config) + [problem for part in parts for problem in part.problems()]


def _size_problems(parallel: ParallelConfig, ranks: int, ranks_of_node: int) -> list[str]:
    """Sizes that are given and of which no number of devices is a multiple."""
    given = {flag(name): getattr(parallel, name) for name in SIZES if getattr(parallel, name) != 1}
    if wrong := [f"{name} must be at least 1, got {size}" for name, size in given.items() if size < 1]:
        return wrong
    able = counts(ranks, ranks_of_node)
    if any(count % math.prod(given.values()) == 0 for count in able):
        return []
    told = " x ".join(f"{name} {size}" for name, size in given.items())
    return [
        f"{told}: none of {', '.join(map(str, able))} device(s) is a multiple of it; change --gpus, or leave it out"
    ]


def _not_planned(config: PretrainConfig) -> list[str]:
    parallel, default = config.parallel, ParallelConfig()
    wrong = [
        f"{name} is decided by the plan, or given to the run behind it: leave it out (none takes it back)"
        for name in DECIDED
        if getattr(parallel, name[2:].replace("-", "_")) != getattr(default, name[2:].replace("-", "_"))
    ]
    for name, value in (
        ("--weight-gradients", parallel.weight_gradients),
        ("--cuda-graphs", config.training.cuda_graphs),
    ):
        if value not in ("once", "off"):
            wrong.append(f"{name} {value} is not planned, and changes what a rank needs: give it to the run")
    if config.training.bptt_steps is not None:
        wrong.append(f"--bptt-steps {config.training.bptt_steps} is not planned: leave it out")
    return wrong


def _advice(config: PretrainConfig, layout: Layout, cluster: Cluster) -> Iterator[str]:
    """What is not the planner's to change."""
    training, grid = config.training, layout.grid
    count, stages = layout.micro_batches(training.micro_batches), grid.pipeline
    if stages > 1 and count < 4 * stages:
        size = advised_size(training.global_batch_size // grid.replicas, stages)
        if size < training.micro_batch_size:
            yield (
                f"{count} micro-batch(es) for {stages} stages are few, about four a stage hide the bubble: "
                f"--micro-batch-size {size} would give them, and norms would see {size} samples and not "
                f"{training.micro_batch_size}"
            )
    if training.micro_batches % grid.replicas:
        yield f"{training.micro_batches} micro-batches on {grid.replicas} replicas are uneven: some wait for others"
    if layout.ranks < cluster.ranks:
        yield (
            f"{cluster.ranks - layout.ranks} of {cluster.ranks} devices are left out: with --global-batch-size "
            f"{training.global_batch_size} in micro-batches of {training.micro_batch_size} they would not help"
        )


def _warnings(analysis: Analysis, config: PretrainConfig, cluster: Cluster) -> Iterator[str]:
    if config.checkpoint.async_save and cluster.machine.kind == "cpu":
        yield "--async-save copies weights and optimizer state, which is not in the figures: leave memory for that"
    if not _is_of_another(analysis, cluster):
        return
    where = "not measured"
    if analysis.machine is not None:
        where = f"measured on {analysis.machine.name}, which is not used (leave --device-name out for that)"
    yield f"layers were {where}, and the plan is for {cluster.machine.name}: {cluster.machine.told}"
