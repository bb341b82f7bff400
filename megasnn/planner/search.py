"""The search: every layout by its bounds, the best of them simulated, and why the others are not taken."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from megasnn.config import PretrainConfig
from megasnn.config.checks import flag
from megasnn.planner.candidates import Candidate, Layout, Prefer, given_flags, layouts
from megasnn.planner.cost_file import Analysis
from megasnn.planner.machines import Cluster
from megasnn.planner.predict import Predicted, Predictor
from megasnn.schedule.passes import NEVER

AS_FAST = 1.01  # times as long as the fastest is as fast, as far as the planner can tell
SLOWER = 4.0  # times the fastest step: a grid whose 1F1B takes longer has no better one
MOST_COMPUTATIONS = 40_000  # of a schedule that is simulated
PATIENCE = 1.4  # times the time for simulations, where nothing has fitted yet
MOST_REASONS = 4  # told of a search that finds nothing
GB = 1e9


class PlanError(ValueError):
    """There is no plan. The message says by how much something is missing, and what would do."""


class Search:
    """Candidates, and which of them is the best. Args: sizes: of micro-batches, the most promising first."""

    def __init__(
        self, analysis: Analysis, config: PretrainConfig, cluster: Cluster, prefer: Prefer, sizes: Sequence[int]
    ) -> None:
        self._analysis, self._cluster, self._prefer = analysis, cluster, prefer
        self._configs = {size: _with_size(config, size) for size in sizes}
        first = Predictor(analysis, self._configs[sizes[0]], cluster)
        self._predictors = {size: Predictor(analysis, each, cluster, first) for size, each in self._configs.items()}
        self._fastest = math.inf  # bound of the fastest step that fits, so far
        self._slowest = math.inf  # seconds of one device, where that fits: no plan for memory or room is slower
        self._simulated: dict[tuple[Layout, int], tuple[Candidate, Predicted | None]] = {}

    def best(self, simulations: int, seconds: float) -> tuple[Candidate, Predicted, list[Candidate], int]:
        """The candidate to take, its step, all candidates, and how many of them were simulated.

        Args:
            simulations: at most. seconds: for all of it, half of them for simulations at least.
        Raises:
            PlanError: none fits, or none can be.
        """
        begin = time.monotonic()
        looked_at = [each for size in self._configs for each in self._looked_at(size)]
        until = max(begin + seconds, time.monotonic() + seconds / 2)
        fitting = sorted((each for each in looked_at if each.seconds is not None and not each.reason), key=self.rank)
        one = sorted((each for each in fitting if each.layout.ranks == 1), key=_seconds)[:1]
        last = time.monotonic() + PATIENCE * (until - time.monotonic())
        # Where bounds fit and no simulation does, what needs least is tried before the time is up.
        for number, each in enumerate(chain(one, fitting, sorted(fitting, key=_bytes))):
            enough = len(self._able()) >= simulations or time.monotonic() > until
            if number and ((self._taken() and enough) or time.monotonic() > last):
                break
            if (each.layout, each.micro_batch_size) not in self._simulated and (not number or self._may_be_taken(each)):
                self._simulate(each)
                if number == 0 and one and self._prefer != "speed":
                    alone = self._simulated[each.layout, each.micro_batch_size][0]
                    self._slowest = math.inf if alone.reason else _seconds(alone)
        taken = self._taken()
        found = [self._simulated.get((each.layout, each.micro_batch_size), (each, None))[0] for each in looked_at]
        if taken is None:
            raise PlanError(self._why_none(found))
        predicted = self._simulated[taken.layout, taken.micro_batch_size][1]
        assert predicted is not None, "it was simulated"
        return taken, predicted, found, len(self._simulated)

    def _looked_at(self, size: int) -> list[Candidate]:
        """Every layout with micro-batches of so many samples, by bounds."""
        predictor, found = self._predictors[size], []

        def bounded(layout: Layout) -> Candidate:
            try:
                seconds, need = predictor.least(layout)
            except ValueError as error:
                return Candidate(layout, size, None, None, reason=str(error))
            return Candidate(layout, size, seconds, need, reason=self._misfit(need))

        def may_be_best(plain: Layout) -> bool:
            """On 4,096 devices this leaves a fifth of 113,000 layouts. No schedule gains that much over 1F1B by less
            bubble where as many micro-batches as stages are there; one device is always looked at."""
            if self._prefer != "speed" or plain.ranks == 1:
                return True
            seconds = bounded(plain).seconds
            return seconds is None or seconds < SLOWER * self._fastest

        for layout, refused in layouts(self._analysis, self._configs[size], self._cluster.counts(), may_be_best):
            each = Candidate(layout, size, None, None, reason=refused) if refused else bounded(layout)
            if not each.reason:
                self._fastest = min(self._fastest, _seconds(each))
            found.append(each)
        return found

    def _misfit(self, need: float) -> str:
        limit = self._cluster.machine.memory
        return "" if need <= limit else f"needs {need / GB:.2f} GB a rank, and there are {limit / GB:.2f}"

    def rank(self, each: Candidate) -> tuple[object, ...]:
        """The best first: what fits, by what is preferred, then by the other; those that cannot be come last."""
        if each.seconds is None or each.bytes is None:
            return (2,)
        misfits, parts = bool(self._misfit(each.bytes)), each.layout.parts
        step = round(100 * math.log(max(each.seconds, 1e-12)))  # in steps of 1 %, of which the simplest is first
        if self._prefer == "memory":
            return misfits, each.bytes, each.seconds, parts
        if self._prefer == "capacity":
            return misfits, -self.largest_micro_batch(each), step, parts, each.seconds
        return misfits, step, parts, -each.micro_batch_size, each.seconds, each.bytes

    def largest_micro_batch(self, each: Candidate) -> int:
        """Samples of the largest micro-batch that would fit, as far as bounds tell: states do not grow with it."""
        states = self._predictors[each.micro_batch_size].without_samples(each.layout)
        growing = max(_bytes(each) - states, 1.0)
        return max(0, int(each.micro_batch_size * (self._cluster.machine.memory - states) / growing))

    def _simulate(self, each: Candidate) -> None:
        key = each.layout, each.micro_batch_size
        predictor, count = self._predictors[each.micro_batch_size], self._configs[each.micro_batch_size].training
        units = len(each.layout.placement)
        if each.layout.recompute != NEVER or each.layout.grid.dp_shard > 1:
            units = len(self._analysis.layers)
        if 3 * each.layout.micro_batches(count.micro_batches) * units > MOST_COMPUTATIONS:
            self._simulated[key] = replace(each, reason="too many computations to simulate"), None
            return
        try:
            predicted = predictor.predict(each.layout)
        except ValueError as error:  # what the schedule cannot place or keep
            self._simulated[key] = replace(each, seconds=None, bytes=None, reason=str(error)), None
            return
        need = predictor.with_program(max(1e6 * (of_rank.total - of_rank.program) for of_rank in predicted.memory))
        seconds, reason = predicted.time.total, self._misfit(need)
        self._simulated[key] = replace(each, seconds=seconds, bytes=need, simulated=True, reason=reason), predicted

    def _preferred(self, each: Candidate) -> float:
        """Quantity that is to be least, before the time of a step decides; of bounds, a bound."""
        if self._prefer == "speed":
            return 0.0
        return float(-self.largest_micro_batch(each)) if self._prefer == "capacity" else _bytes(each)

    def _able(self) -> list[Candidate]:
        """Those that were simulated, fit, and are not slower than one device."""
        found = [each for each, _ in self._simulated.values() if each.simulated and not each.reason]
        return [each for each in found if _seconds(each) <= AS_FAST * self._slowest]

    def _alike(self) -> list[Candidate]:
        """Those of them that have the least of what is preferred."""
        found = self._able()
        least = min(map(self._preferred, found), default=0.0)
        return [each for each in found if self._preferred(each) == least]

    def _taken(self) -> Candidate | None:
        """Picks the simplest of those no more than 1 % slower than the fastest; of alike ones, larger micro-batches."""
        alike = self._alike()
        longest = AS_FAST * min(map(_seconds, alike), default=0.0)
        return min((each for each in alike if _seconds(each) <= longest), key=_simplicity, default=None)

    def _may_be_taken(self, each: Candidate) -> bool:
        """True where a simulation, which shows no less than bounds, may change what is taken."""
        if _seconds(each) > AS_FAST * self._slowest:
            return False
        taken, mine = self._taken(), self._preferred(each)
        if taken is None or mine != self._preferred(taken):
            return taken is None or mine < self._preferred(taken)
        longest = AS_FAST * min(map(_seconds, self._alike()))
        simpler = _seconds(each) <= longest and _simplicity(each) < _simplicity(taken)
        return simpler or AS_FAST * _seconds(each) < _seconds(taken)

    def _why_none(self, looked_at: Sequence[Candidate]) -> str:
        machine, devices = self._cluster.machine, f"no layout of {self._cluster.ranks} device(s)"
        possible = [each for each in looked_at if each.bytes is not None and each.reason]
        if not possible:
            reasons = Counter(each.reason for each in looked_at if each.reason).most_common(MOST_REASONS)
            given = next(iter(self._configs.values())).parallel
            asked = ", ".join(f"{flag(name)} {getattr(given, name)}" for name in given_flags(given))
            told = "; ".join(reason for reason, _ in reasons) or f"none has {asked}; leave some of these out"
            return f"{devices} can be: {told}"
        least = min(possible, key=lambda each: (_bytes(each), each.layout.parts))
        if not least.simulated:  # bounds promise too much
            self._simulate(least)
            least = self._simulated[least.layout, least.micro_batch_size][0]
        ways = [f"--memory {math.ceil(1e-6 * _bytes(least))}MB for each device"]
        states = self._predictors[least.micro_batch_size].without_samples(least.layout)
        if machine.memory > states and least.micro_batch_size > 1:
            ways.append(f"a smaller --micro-batch-size than {least.micro_batch_size}, which changes what norms see")
        if machine.memory > machine.program:
            ways.append("more devices (--gpus)")
        return (
            f"{devices} fits into {machine.memory / GB:.3g} GB each: {least.layout} needs {_bytes(least) / GB:.2f} GB, "
            f"{machine.program / GB:.2f} of it for programs and libraries; what would do: {'; or '.join(ways)}"
        )

    def with_reason(self, each: Candidate, chosen: Candidate) -> Candidate:
        """Why it was not taken."""
        if each.reason or each.seconds is None or each.bytes is None:
            return each
        least = "" if each.simulated else "at least "
        slower = _seconds(each) / _seconds(chosen)
        mine, best = self._preferred(each), self._preferred(chosen)
        if each.seconds > AS_FAST * self._slowest:
            reason = f"slower than one device: {least}{each.seconds / self._slowest:.2f} times its step"
        elif self._prefer == "memory" and mine >= best:
            reason = f"needs more memory: {least}{mine / best:.2f} times as much"
        elif self._prefer == "capacity" and mine > best:
            reason = f"micro-batches of {-mine:.0f} samples fit at most, and of {-best:.0f} in the other"
        elif mine == best and 1 / AS_FAST <= slower <= AS_FAST and _simplicity(each) >= _simplicity(chosen):
            reason = f"takes {least}as long within 1 %, and is no simpler"
        elif mine == best and slower >= 1:
            reason = f"slower: {least}{slower:.2f} times its step"
        else:
            reason = "not simulated: others were taken first, and time or number of simulations was up"
        return replace(each, reason=reason)


def _with_size(config: PretrainConfig, size: int) -> PretrainConfig:
    """The configuration with micro-batches of so many samples."""
    return replace(config, training=replace(config.training, micro_batch_size=size))


def _seconds(each: Candidate) -> float:
    return math.inf if each.seconds is None else each.seconds


def _bytes(each: Candidate) -> float:
    return math.inf if each.bytes is None else each.bytes


def _simplicity(each: Candidate) -> tuple[float, ...]:
    return each.layout.parts, -each.micro_batch_size, _seconds(each), _bytes(each)
