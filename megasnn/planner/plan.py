"""`plan`: which layout to take on a cluster, and why none of the others. Reads a costs file, and needs no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from megasnn.config import ConfigError, PretrainConfig
from megasnn.config.parallel import ParallelConfig
from megasnn.config.validate import layout_problems
from megasnn.grid import ContextCut, Grid
from megasnn.planner.analysis import Analysis, differences
from megasnn.planner.layout import Layout, grids, schedules, with_layout
from megasnn.planner.step import Cluster, Predicted, Predictor
from megasnn.schedule.refine import NEVER

Prefer = Literal["speed", "memory", "capacity"]
SIMULATIONS, SECONDS = 20, 20.0
MOST_COMPUTATIONS = 40_000  # of a schedule that is simulated
GB = 1e9
DECIDED = "--memory-budget", "--pipeline-memory-limit", "--pipeline-model-parallel-layout", "--weight-memory-limit"


class PlanError(ValueError):
    """There is no plan. The message says by how much something is missing, and what would do."""


@dataclass(frozen=True)
class Candidate:
    """A layout that was looked at.

    Attributes:
        seconds, bytes: of a step, and that the largest rank needs; by closed bounds, or simulated. None: it cannot be.
        reason: why it was not taken; "" of the one that was.
    """

    layout: Layout
    seconds: float | None
    bytes: float | None
    simulated: bool
    reason: str


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
    _check(analysis, config)
    search = _Search(analysis, config, cluster, prefer)
    looked_at = [search.looked_at(layout) for layout in _layouts(analysis, config, cluster)]
    chosen, predicted, looked_at, simulated = search.best(
        looked_at, simulations, max(begin + seconds, time.monotonic() + seconds / 4)
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
        warnings=tuple(_warnings(analysis, cluster)),
    )


def _check(analysis: Analysis, config: PretrainConfig) -> None:
    if analysis.model != config.model.name:
        raise PlanError(f"these are costs of {analysis.model}, and the model is {config.model.name}: analyze that one")
    if other := differences(analysis, config):
        raise PlanError(f"these are costs of another {analysis.model}: {'; '.join(other)}; analyze this one")
    parallel, default = config.parallel, ParallelConfig()
    wrong = [
        f"{name} is decided by the plan, or given to the run behind it: leave it out"
        for name in DECIDED
        if getattr(parallel, name[2:].replace("-", "_")) != getattr(default, name[2:].replace("-", "_"))
    ]
    wrong += ["--offload-activations is not planned: give it to the run"] * parallel.offload_activations
    if config.training.bptt_steps is not None:
        wrong.append(f"--bptt-steps {config.training.bptt_steps} is not planned: leave it out")
    training = config.training
    wrong += training.problems() + config.optimizer.problems()
    if wrong:
        raise ConfigError(wrong)


def _layouts(analysis: Analysis, config: PretrainConfig, cluster: Cluster) -> Iterator[Layout | tuple[Layout, str]]:
    """Every layout, with the reason of those that cannot be."""
    counts = sorted(
        {cluster.ranks, *(1 << power for power in range(cluster.ranks.bit_length()) if 1 << power <= cluster.ranks)}
    )
    tensors, cuts = analysis.possible("tensor"), ("samples", "rows")
    contexts: list[int] = sorted({1, *analysis.possible("samples")})
    layers = len(analysis.layers)
    for count in counts:
        for grid in grids(count, list(tensors), contexts, layers):
            for cut in cuts if grid.context > 1 else cuts[:1]:
                yield from _of_grid(analysis, config, grid, cut)  # type: ignore[arg-type]


def _of_grid(
    analysis: Analysis, config: PretrainConfig, grid: Grid, cut: ContextCut
) -> Iterator[Layout | tuple[Layout, str]]:
    plain = Layout(grid, cut)
    asked = _unasked(config, plain)
    if not asked:
        return
    refused = analysis.possible("tensor")[grid.tensor]
    if refused is None and grid.context > 1:
        refused = analysis.possible(cut).get(grid.context, "was not asked for by analyze")
    if refused is None and (problems := layout_problems(with_layout(config, plain), grid.world_size, None)):
        refused = problems[0]
    if refused is not None:
        yield plain, refused
        return
    copies = grid.data * grid.context
    for name, chunks in schedules(grid.pipeline):
        for recompute in (NEVER, "always"):
            for shards in (False, True)[: 1 + (copies > 1)]:
                layout = Layout(grid, cut, name, chunks, recompute, shards)
                if _unasked(config, layout, whole=True):
                    problems = layout_problems(with_layout(config, layout), grid.world_size, lambda: analysis.units)
                    yield (layout, problems[0]) if problems else layout


def _unasked(config: PretrainConfig, layout: Layout, whole: bool = False) -> bool:
    """Whether a layout is one with the flags that were given."""
    given, default = config.parallel, ParallelConfig()
    mine = layout.parallel(default)
    names = [each.name for each in fields(given) if getattr(given, each.name) != getattr(default, each.name)]
    of_sizes = [name for name in names if name.endswith("_size") or name == "context_parallel_cut"]
    of_others = [name for name in names if name in _OF_LAYOUTS] if whole else []
    return all(getattr(given, name) == getattr(mine, name) for name in (*of_sizes, *of_others))


_OF_LAYOUTS = {
    *("pipeline_schedule", "num_virtual_stages_per_pipeline_rank", "recompute", "use_distributed_optimizer"),
}


def _step_of(seconds: float) -> int:
    """In steps of one per cent: of what is as fast, as far as the planner can tell, the simplest is taken."""
    return round(100 * math.log(max(seconds, 1e-12)))


class _Search:
    """Candidates, and which of them is the best."""

    def __init__(self, analysis: Analysis, config: PretrainConfig, cluster: Cluster, prefer: Prefer) -> None:
        self._config, self._cluster, self._prefer = config, cluster, prefer
        self._predictor = Predictor(analysis, config, cluster)

    def looked_at(self, layout: Layout | tuple[Layout, str]) -> Candidate:
        """By bounds."""
        if isinstance(layout, tuple):
            return Candidate(layout[0], None, None, False, layout[1])
        try:
            seconds, need = self._predictor.least(layout)
        except ValueError as error:
            return Candidate(layout, None, None, False, str(error))
        return Candidate(layout, seconds, need, False, self._misfit(need))

    def _misfit(self, need: float) -> str:
        limit = self._cluster.machine.memory
        return "" if need <= limit else f"needs {need / GB:.2f} GB a rank, and there are {limit / GB:.2f}"

    def rank(self, each: Candidate) -> tuple[object, ...]:
        """The best first: what fits, by what is preferred, then by the other; those that cannot be come last."""
        if each.seconds is None or each.bytes is None:
            return (2,)
        misfits = bool(self._misfit(each.bytes))
        if self._prefer == "speed":
            return (misfits, _step_of(each.seconds), each.layout.parts, each.seconds, each.bytes)
        if self._prefer == "capacity":
            return (misfits, -self.largest_micro_batch(each), _step_of(each.seconds), each.layout.parts, each.seconds)
        return (misfits, each.bytes, each.seconds, each.layout.parts)

    def largest_micro_batch(self, each: Candidate) -> int:
        """Samples of the largest micro-batch that would fit, as far as bounds tell: states do not grow with it."""
        assert each.bytes is not None
        size, states = self._config.training.micro_batch_size, self._predictor.without_samples(each.layout)
        growing = max(each.bytes - states, 1.0)
        return max(0, int(size * (self._cluster.machine.memory - states) / growing))

    def best(
        self, looked_at: Sequence[Candidate], simulations: int, until: float
    ) -> tuple[Candidate, Predicted, list[Candidate], int]:
        """The one to take, simulated, its step, all candidates with what simulations have shown, and their number."""
        order = sorted((each for each in looked_at if each.seconds is not None), key=self.rank)
        fitting = [each for each in order if not each.reason]
        found: dict[Layout, Candidate] = {}
        best: tuple[Candidate, Predicted] | None = None
        one = [each for each in fitting if each.layout.ranks == 1][:1]  # there is always something to be faster than
        for each in [*one, *fitting]:
            if each.layout in found:
                continue
            if best is not None and (self.rank(each) >= self.rank(best[0]) or time.monotonic() > until):
                break
            if len(found) == simulations:
                break
            if self._computations(each.layout) > MOST_COMPUTATIONS:
                continue
            try:
                predicted = self._predictor.predict(each.layout)
            except ValueError as error:
                found[each.layout] = replace(each, reason=str(error), seconds=None, bytes=None)
                continue
            tensors = max(1e6 * (memory.total - memory.program) for memory in predicted.memory)
            need = self._predictor.with_program(tensors)
            mine = replace(each, seconds=predicted.time.total, bytes=need, simulated=True, reason=self._misfit(need))
            found[each.layout] = mine
            if not mine.reason and (best is None or self.rank(mine) < self.rank(best[0])):
                best = mine, predicted
        if best is None:
            raise PlanError(self._what_would_fit([*order, *found.values()]))
        return *best, [found.get(each.layout, each) for each in looked_at], len(found)

    def _computations(self, layout: Layout) -> int:
        count = layout.micro_batches(self._config.training.micro_batches)
        units = len(layout.placement) if layout.recompute == NEVER and layout.grid.weight == 1 else 24
        return 3 * count * units

    def _what_would_fit(self, order: Sequence[Candidate]) -> str:
        possible = [each for each in order if each.bytes is not None]
        size, limit = self._config.training.micro_batch_size, self._cluster.machine.memory
        if not possible:
            return f"no layout of {self._cluster.ranks} device(s) can be: see the reasons of the sizes"
        least = min(possible, key=lambda each: each.bytes or 0.0)
        assert least.bytes is not None
        over = least.bytes - limit
        ways = [f"--memory {least.bytes / GB:.2f}GB for each device"]
        if size > 1:
            ways.append(f"a smaller --micro-batch-size than {size}, which changes what norms see")
        ways.append("more devices (--gpus)")
        return (
            f"no layout of {self._cluster.ranks} device(s) fits into {limit / GB:.2f} GB each: the least needs "
            f"{least.bytes / GB:.2f} GB, {over / GB:.2f} GB more ({least.layout}); what would do: {'; or '.join(ways)}"
        )

    def with_reason(self, each: Candidate, chosen: Candidate) -> Candidate:
        """Why it was not taken."""
        if each.reason or each.seconds is None or each.bytes is None:
            return each
        how = "simulated" if each.simulated else "at least"
        if self._prefer == "capacity":
            mine, best = self.largest_micro_batch(each), self.largest_micro_batch(chosen)
            if mine <= best and not each.simulated:
                return replace(each, reason=f"micro-batches of {mine} samples fit at most, and of {best} in the other")
            return replace(each, reason=f"micro-batches of {mine} samples fit, and of {best} in the other, or as fast")
        if self._prefer == "speed":
            assert chosen.seconds is not None
            if _step_of(each.seconds) == _step_of(chosen.seconds) and each.layout.parts >= chosen.layout.parts:
                return replace(each, reason=f"{how} as long, within 1 %, and no simpler")
            if each.seconds >= chosen.seconds:
                return replace(each, reason=f"slower: {how} {each.seconds / chosen.seconds:.2f} times its step")
        else:
            assert chosen.bytes is not None
            if each.bytes >= chosen.bytes:
                return replace(each, reason=f"needs more memory: {how} {each.bytes / chosen.bytes:.2f} times as much")
        return replace(each, reason="not simulated: others were taken first, and time or number of simulations was up")


def _advice(config: PretrainConfig, layout: Layout, cluster: Cluster) -> Iterator[str]:
    """What is not the planner's to change."""
    training, grid = config.training, layout.grid
    count, stages = layout.micro_batches(training.micro_batches), grid.pipeline
    if stages > 1 and count < 4 * stages:
        size = max(1, training.global_batch_size // (4 * stages * grid.replicas))
        if size < training.micro_batch_size:
            yield (
                f"{count} micro-batches for {stages} stages are few, about four a stage hide the bubble: "
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


def _warnings(analysis: Analysis, cluster: Cluster) -> Iterator[str]:
    measured = analysis.machine
    if measured is None or measured.name != cluster.machine.name:
        where = "nowhere" if measured is None else f"on {measured.name}"
        yield f"layers were measured {where}, and the plan is for {cluster.machine.name}: {cluster.machine.told}"
