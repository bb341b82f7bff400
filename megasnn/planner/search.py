"""Candidates for a plan: every layout of a cluster, and of those that can be the best, simulated."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache
from itertools import chain, takewhile

from megasnn.config import PretrainConfig
from megasnn.config.checks import flag
from megasnn.config.parallel import ParallelConfig
from megasnn.config.validate import layout_problems
from megasnn.grid import ContextCut, Grid
from megasnn.planner.analysis import Analysis
from megasnn.planner.candidates import AS_FAST, Candidate, Choice, Prefer
from megasnn.planner.cluster import Cluster
from megasnn.planner.held import identity_of
from megasnn.planner.layout import Layout, grids, schedules, with_layout
from megasnn.planner.predicted import Predicted
from megasnn.planner.step import Predictor
from megasnn.schedule.passes import NEVER

MOST_COMPUTATIONS = 40_000  # of a schedule that is simulated
PATIENCE = 1.4  # times the time for simulations, where nothing has fitted yet
SLOWER = 4.0  # times the fastest step: a grid whose 1F1B takes longer has no better one
MOST_REASONS = 4  # told of a search that finds nothing
SECONDS_OF_REASONS = 4.0  # for simulations that say what would fit
GB = 1e9


class PlanError(ValueError):
    """There is no plan. The message says by how much something is missing, and what would do."""


def layouts(
    analysis: Analysis, config: PretrainConfig, cluster: Cluster, may_be_best: Callable[[Layout], bool] = lambda _: True
) -> Iterator[Layout | tuple[Layout, str]]:
    """Yields every layout, with the reason of those that cannot be; most devices first.

    Args:
        may_be_best: asked of a grid's plain layout (1F1B); the others of the grid are left out where it says no.
    """
    tensors = analysis.possible("tensor")
    cuts: tuple[ContextCut, ...] = "samples", "rows"
    contexts: list[int] = sorted({1, *analysis.possible("samples")})
    layers = len(analysis.layers)
    for count in reversed(cluster.counts()):
        for grid in grids(count, list(tensors), contexts, layers):
            for cut in cuts if grid.context > 1 else cuts[:1]:
                yield from _of_grid(analysis, config, grid, cut, may_be_best)


def _of_grid(
    analysis: Analysis, config: PretrainConfig, grid: Grid, cut: ContextCut, may_be_best: Callable[[Layout], bool]
) -> Iterator[Layout | tuple[Layout, str]]:
    plain = Layout(grid, cut)
    if not _is_asked(config, plain):
        return
    refused = analysis.possible("tensor")[grid.tensor]
    if refused is None and grid.context > 1:
        refused = analysis.possible(cut).get(grid.context, "was not asked for by analyze")
    if refused is None and (problems := layout_problems(with_layout(config, plain), grid.world_size, None)):
        refused = problems[0]
    if refused is not None:
        yield plain, refused
        return
    if not may_be_best(plain):
        yield plain
        return
    copies, count = grid.data * grid.context, plain.micro_batches(config.training.micro_batches)
    first_of = dict[Hashable, str]()
    for name, chunks in schedules(grid.pipeline):
        for recompute in (NEVER, "always"):
            for shards in (False, True)[: 1 + (copies > 1)]:
                layout = Layout(grid, cut, name, chunks, recompute, shards)
                if not _is_asked(config, layout, whole=True):
                    continue
                what = identity_of(name, grid.pipeline, count), chunks, recompute, shards
                if (first := first_of.setdefault(what, name)) != name:
                    yield layout, f"the same as {first} with {count} micro-batch(es) on {grid.pipeline} stages"
                    continue
                problems = layout_problems(with_layout(config, layout), grid.world_size, lambda: analysis.units)
                yield (layout, problems[0]) if problems else layout


def _is_asked(config: PretrainConfig, layout: Layout, whole: bool = False) -> bool:
    """Whether a layout is one with the flags that were given."""
    given = config.parallel
    names = [name for name in _given(given) if name in _SIZES or (whole and name in _OF_LAYOUTS)]
    if not names:
        return True
    mine = layout.parallel(ParallelConfig())
    return all(getattr(given, name) == getattr(mine, name) for name in names)


@cache
def _given(parallel: ParallelConfig) -> tuple[str, ...]:
    """The fields that have not their defaults."""
    default = ParallelConfig()
    return tuple(each.name for each in fields(parallel) if getattr(parallel, each.name) != getattr(default, each.name))


_SIZES = {"context_parallel_cut", *(each.name for each in fields(ParallelConfig) if each.name.endswith("_size"))}
_OF_LAYOUTS = {
    *("pipeline_schedule", "num_virtual_stages_per_pipeline_rank", "recompute", "use_distributed_optimizer"),
}


def _step_of(seconds: float) -> int:
    """In steps of one per cent: for the order in which candidates are simulated and shown, the simplest first."""
    return round(100 * math.log(max(seconds, 1e-12)))


class Search:
    """Candidates, and which of them is the best."""

    def __init__(self, analysis: Analysis, config: PretrainConfig, cluster: Cluster, prefer: Prefer) -> None:
        self._config, self._cluster, self._prefer = config, cluster, prefer
        self._predictor = Predictor(analysis, config, cluster)
        self._fastest = math.inf  # bound of the fastest step that fits, so far

    def looked_at(self, layout: Layout | tuple[Layout, str]) -> Candidate:
        """By bounds."""
        if isinstance(layout, tuple):
            return Candidate(layout[0], None, None, False, layout[1])
        try:
            seconds, need = self._predictor.least(layout)
        except ValueError as error:
            return Candidate(layout, None, None, False, str(error))
        return Candidate(layout, seconds, need, False, self._misfit(need))

    def all_looked_at(self, found: Iterable[Layout | tuple[Layout, str]]) -> list[Candidate]:
        """Looks at each, as it comes."""
        looked_at = []
        for layout in found:
            each = self.looked_at(layout)
            if each.seconds is not None and not each.reason:
                self._fastest = min(self._fastest, each.seconds)
            looked_at.append(each)
        return looked_at

    def may_be_best(self, plain: Layout) -> bool:
        """True unless speed is preferred and a grid's 1F1B is bound to take four times the fastest step so far.

        On 4,096 devices this leaves a fifth of 113,000 layouts. No schedule gains that much over 1F1B by less bubble
        where as many micro-batches as stages are there; one device is always looked at.
        """
        if self._prefer != "speed" or plain.ranks == 1:
            return True
        each = self.looked_at(plain)
        return each.seconds is None or each.seconds < SLOWER * self._fastest

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
        misfits: dict[Layout, Candidate] = {}
        steps: dict[Layout, Predicted] = {}
        last = time.monotonic() + PATIENCE * (until - time.monotonic())
        choice = Choice(self._preferred)
        one = sorted((each for each in fitting if each.layout.ranks == 1), key=lambda each: each.seconds or 0.0)[:1]
        if one and self._prefer != "speed":  # of one device bounds are its time, and no plan is slower
            choice.slowest = one[0].seconds or math.inf

        slower = 0  # of those that were simulated, how many are slower than one device

        def enough() -> bool:
            return len(found) - slower >= simulations or time.monotonic() > until

        # Where bounds fit and no simulation does, what needs least is tried before the time is up.
        smallest = sorted(fitting, key=lambda each: each.bytes or 0.0)
        for each in chain(takewhile(lambda _: not enough(), fitting), one, smallest):
            if each.layout in found or each.layout in misfits:
                continue
            if (choice.taken and enough()) or time.monotonic() > last:
                break
            each = self._looked_at_closer(each)
            if each.reason:
                misfits[each.layout] = each
                continue
            if not choice.may_change_by(each):
                continue
            if self._computations(each.layout) > MOST_COMPUTATIONS:
                continue
            try:
                mine, predicted = self._simulated(each)
            except ValueError as error:
                found[each.layout] = replace(each, reason=str(error), seconds=None, bytes=None)
                continue
            found[each.layout] = mine
            slower += (mine.seconds or 0.0) > AS_FAST * choice.slowest
            if not mine.reason:
                choice.add(mine)
                steps[mine.layout] = predicted
        known = misfits | found
        if choice.taken is None:
            raise PlanError(self._why_none([known.get(each.layout, each) for each in looked_at]))
        return (
            choice.taken,
            steps[choice.taken.layout],
            [known.get(each.layout, each) for each in looked_at],
            len(found),
        )

    def _looked_at_closer(self, each: Candidate) -> Candidate:
        """With a bound of memory over all backwards of the schedule."""
        need = max(each.bytes or 0.0, self._predictor.least_bytes(each.layout))
        return replace(each, bytes=need, reason=self._misfit(need))

    def _preferred(self, each: Candidate) -> float:
        """What is wanted to be least, before the time of a step decides."""
        if self._prefer == "speed":
            return 0.0
        return float(-self.largest_micro_batch(each)) if self._prefer == "capacity" else each.bytes or 0.0

    def _simulated(self, each: Candidate) -> tuple[Candidate, Predicted]:
        """Raises ValueError for what the schedule cannot place or keep."""
        predicted = self._predictor.predict(each.layout)
        need = self._predictor.with_program(max(1e6 * (each.total - each.program) for each in predicted.memory))
        seconds = predicted.time.total
        return replace(each, seconds=seconds, bytes=need, simulated=True, reason=self._misfit(need)), predicted

    def _computations(self, layout: Layout) -> int:
        count = layout.micro_batches(self._config.training.micro_batches)
        units = len(layout.placement) if layout.recompute == NEVER and layout.grid.weight == 1 else 24
        return 3 * count * units

    def _why_none(self, looked_at: Sequence[Candidate]) -> str:
        possible = [each for each in looked_at if each.bytes is not None and each.reason]
        machine, devices = self._cluster.machine, f"no layout of {self._cluster.ranks} device(s)"
        if not possible:
            reasons = Counter(each.reason for each in looked_at if each.reason).most_common(MOST_REASONS)
            told = "; ".join(reason for reason, _ in reasons)
            return f"{devices} can be: " + (told or f"none has {', '.join(self._asked())}; leave some of these out")
        least = self._least_of(possible)
        assert least.bytes is not None, "it does not fit"
        size, over = self._config.training.micro_batch_size, least.bytes - machine.memory
        ways = [f"--memory {math.ceil(1e-6 * least.bytes)}MB for each device"]
        if machine.memory > self._predictor.without_samples(least.layout) and size > 1:
            ways.append(f"a smaller --micro-batch-size than {size}, which changes what norms see")
        if machine.memory > machine.program:
            ways.append("more devices (--gpus)")
        return (
            f"{devices} fits into {machine.memory / GB:.3g} GB each: the least needs {least.bytes / GB:.2f} GB "
            f"({least.layout}), {over / GB:.2f} GB more; programs and libraries take {machine.program / GB:.2f} of it; "
            f"what would do: {'; or '.join(ways)}"
        )

    def _asked(self) -> list[str]:
        given = self._config.parallel
        return [f"{flag(name)} {getattr(given, name)}" for name in _given(given)]

    def _least_of(self, possible: Sequence[Candidate]) -> Candidate:
        """What needs least of what does not fit: simulated where it can be, since bounds promise too much.

        Of each grid, what has the least bound, until the next one is no better than the best simulation.
        """
        of_grids: dict[Grid, Candidate] = {}
        for each in sorted(possible, key=lambda each: (each.bytes or 0.0, each.layout.parts)):
            of_grids.setdefault(each.layout.grid, each)
        shown = [each for each in possible if each.simulated]
        until = time.monotonic() + SECONDS_OF_REASONS
        for each in of_grids.values():
            least = min((each.bytes or 0.0 for each in shown), default=math.inf)
            if (each.bytes or 0.0) >= least or time.monotonic() > until:
                break
            if not each.simulated and self._computations(each.layout) <= MOST_COMPUTATIONS:
                with suppress(ValueError):
                    shown.append(self._simulated(each)[0])
        return min(shown or possible, key=lambda each: each.bytes or 0.0)

    def with_reason(self, each: Candidate, chosen: Candidate) -> Candidate:
        """Why it was not taken."""
        if each.reason or each.seconds is None or each.bytes is None:
            return each
        least = "" if each.simulated else "at least "
        if self._prefer == "capacity":
            mine, best = self.largest_micro_batch(each), self.largest_micro_batch(chosen)
            if mine < best:
                most = "" if each.simulated else " at most"
                return replace(each, reason=f"micro-batches of {mine} samples fit{most}, and of {best} in the other")
            if self.rank(each) >= self.rank(chosen):
                told = f"micro-batches of {best} samples fit in both; it takes {least}as long, or is no simpler"
                return replace(each, reason=told)
        elif self._prefer == "speed":
            assert chosen.seconds is not None
            as_long = each.seconds <= AS_FAST * chosen.seconds and chosen.seconds <= AS_FAST * each.seconds
            if as_long and each.layout.parts >= chosen.layout.parts:
                return replace(each, reason=f"takes {least}as long within 1 %, and is no simpler")
            if each.seconds >= chosen.seconds:
                return replace(each, reason=f"slower: {least}{each.seconds / chosen.seconds:.2f} times its step")
        else:
            assert chosen.bytes is not None
            if each.bytes >= chosen.bytes:
                return replace(each, reason=f"needs more memory: {least}{each.bytes / chosen.bytes:.2f} times as much")
        return replace(each, reason="not simulated: others were taken first, and time or number of simulations was up")
