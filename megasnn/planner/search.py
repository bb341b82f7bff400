"""The search: every layout by an estimate, the best of them simulated, and why the others are not taken."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter

from megasnn.config import PretrainConfig
from megasnn.config.checks import flag
from megasnn.planner.candidates import Candidate, Layout, Prefer, layouts, set_flags
from megasnn.planner.costs import Analysis
from megasnn.planner.machines import GB, Cluster
from megasnn.planner.predict import Predicted, Predictor
from megasnn.schedule.passes import NEVER

AS_FAST = 1.01  # times as long as the fastest is as fast, as far as the planner can tell
NEAR = 1.1  # times the memory: of an estimate that is no larger a simulation decides
SLOWER = 4.0  # times the fastest step: a grid whose 1F1B takes longer has no better one
TRIED = 3  # times as many are simulated as are to fit
MOST_COMPUTATIONS = 40_000  # of a schedule that is simulated
MOST_REASONS = 4  # told of a search that finds nothing
SECONDS, BYTES = attrgetter("seconds"), attrgetter("bytes")


class PlanError(ValueError):
    """There is no plan. The message says by how much something is missing, and what would do."""


class Search:
    """Candidates, and which of them is the best. Args: sizes: of micro-batches."""

    def __init__(
        self,
        analysis: Analysis,
        config: PretrainConfig,
        cluster: Cluster,
        prefer: Prefer,
        sizes: Sequence[int],
    ) -> None:
        self._analysis, self._config, self._cluster, self._prefer = analysis, config, cluster, prefer
        self._sizes, self._predictor = sizes, Predictor(analysis, config, cluster)
        self._fastest = math.inf  # estimate of the fastest step that fits, so far
        self._slowest = math.inf  # seconds of one device, where that fits: no plan for memory or room is slower
        self._simulated: dict[Layout, tuple[Candidate, Predicted | None]] = {}

    def best(self, simulations: int) -> tuple[Candidate, Predicted, list[Candidate], int]:
        """The candidate to take, its step, all candidates, and how many of them were simulated.

        Args:
            simulations: that fit, at most.
        Raises:
            PlanError: none fits, or none can be.
        """
        looked_at = list(self._looked_at())
        fitting = sorted((each for each in looked_at if not each.reason), key=self.rank)
        smallest = sorted((each for each in looked_at if not math.isinf(each.bytes)), key=BYTES)[:simulations]
        one = sorted((each for each in fitting if each.layout.ranks == 1), key=SECONDS)[:1]
        # Where no simulation fits, what needs least is tried, although its estimate may be too large.
        for each in chain(one, fitting[: TRIED * simulations], smallest):
            if len(self._able()) >= simulations:
                break
            if each.layout not in self._simulated:
                self._simulate(each)
            if one and self._prefer != "speed" and len(self._simulated) == 1:
                alone = self._simulated[each.layout][0]
                self._slowest = math.inf if alone.reason else alone.seconds
        taken = self._taken()
        found = [self._simulated.get(each.layout, (each, None))[0] for each in looked_at]
        if taken is None:
            raise PlanError(self._why_none(found))
        predicted = self._simulated[taken.layout][1]
        assert predicted is not None, "it was simulated"
        return taken, predicted, found, len(self._simulated)

    def _looked_at(self) -> Iterator[Candidate]:
        """Every layout by its estimate."""
        counts = self._cluster.counts()
        for layout, refused in layouts(self._analysis, self._config, counts, self._sizes, self._may_be_best):
            each = Candidate(layout, reason=refused) if refused else self._estimated(layout)
            if not each.reason:
                self._fastest = min(self._fastest, each.seconds)
            yield each

    def _estimated(self, layout: Layout) -> Candidate:
        try:
            seconds, need = self._predictor.estimate(layout)
        except ValueError as error:
            return Candidate(layout, reason=str(error))
        return Candidate(layout, seconds, need, reason=self._misfit(need, NEAR))

    def _may_be_best(self, plain: Layout) -> bool:
        """On 4,096 devices this leaves a fifth of 113,000 layouts. No schedule gains that much over 1F1B by less bubble
        where as many micro-batches as stages are there; one device is always looked at."""
        if self._prefer != "speed" or plain.ranks == 1:
            return True
        return self._estimated(plain).seconds < SLOWER * self._fastest

    def _misfit(self, need: float, near: float = 1.0) -> str:
        limit = self._cluster.machine.memory
        return "" if need <= near * limit else f"needs {need / GB:.2f} GB a rank, and there are {limit / GB:.2f}"

    def rank(self, each: Candidate) -> tuple[object, ...]:
        """The best first: what fits, by what is preferred, then by the other; those that cannot be come last."""
        if math.isinf(each.seconds):
            return (2,)
        misfits, parts = bool(self._misfit(each.bytes)), each.layout.parts
        step = round(100 * math.log(max(each.seconds, 1e-12)))  # in steps of 1 %, of which the simplest is first
        if self._prefer == "memory":
            return misfits, each.bytes, each.seconds, parts
        if self._prefer == "capacity":
            return misfits, -self.largest_micro_batch(each), step, parts, each.seconds
        return misfits, step, parts, -each.layout.micro_batch_size, each.seconds, each.bytes

    def largest_micro_batch(self, each: Candidate) -> int:
        """Samples of the largest micro-batch that would fit, as far as this one tells: states do not grow with it."""
        states = self._predictor.without_samples(each.layout)
        growing = max(each.bytes - states, 1.0)
        return max(0, int(each.layout.micro_batch_size * (self._cluster.machine.memory - states) / growing))

    def _simulate(self, each: Candidate) -> None:
        segments = len(each.layout.placement)
        if each.layout.recompute != NEVER or each.layout.grid.dp_shard > 1:
            segments = len(self._analysis.layers)
        if 3 * self._predictor.micro_batches(each.layout) * segments > MOST_COMPUTATIONS:
            self._simulated[each.layout] = replace(each, reason="too many computations to simulate"), None
            return
        try:
            predicted = self._predictor.predict(each.layout)
        except ValueError as error:  # what the schedule cannot place or keep
            self._simulated[each.layout] = replace(each, seconds=math.inf, bytes=math.inf, reason=str(error)), None
            return
        need = self._predictor.with_program(max(1e6 * (rank.total - rank.program) for rank in predicted.memory))
        seconds, reason = predicted.time.total, self._misfit(need)
        found = replace(each, seconds=seconds, bytes=need, simulated=True, reason=reason)
        self._simulated[each.layout] = found, predicted

    def _preferred(self, each: Candidate) -> float:
        """Quantity that is to be least, before the time of a step decides."""
        if self._prefer == "speed":
            return 0.0
        return float(-self.largest_micro_batch(each)) if self._prefer == "capacity" else each.bytes

    def _able(self) -> list[Candidate]:
        """Those that were simulated, fit, and are not slower than one device."""
        found = [each for each, _ in self._simulated.values() if each.simulated and not each.reason]
        return [each for each in found if each.seconds <= AS_FAST * self._slowest]

    def _taken(self) -> Candidate | None:
        """Chooses, of those that have the least of what is preferred, the simplest within 1 % of the fastest; of alike
        ones, larger micro-batches."""
        able = self._able()
        least = min(map(self._preferred, able), default=0.0)
        able = [each for each in able if self._preferred(each) == least]
        longest = AS_FAST * min(map(SECONDS, able), default=0.0)
        return min((each for each in able if each.seconds <= longest), key=self._simplicity, default=None)

    def _simplicity(self, each: Candidate) -> tuple[float, ...]:
        return each.layout.parts, -each.layout.micro_batch_size, each.seconds, each.bytes

    def _why_none(self, looked_at: Sequence[Candidate]) -> str:
        devices = f"no layout of {self._cluster.ranks} device(s)"
        simulated = [each for each in looked_at if each.simulated]
        if not simulated:
            reasons = Counter(each.reason for each in looked_at if each.reason).most_common(MOST_REASONS)
            parallel = self._config.parallel
            asked = ", ".join(f"{flag(name)} {getattr(parallel, name)}" for name in set_flags(parallel))
            listed = "; ".join(reason for reason, _ in reasons) or f"none has {asked}; leave some of these out"
            return f"{devices} can be: {listed}"
        least = min(simulated, key=BYTES)
        return (
            f"{devices} fits into {self._cluster.machine.memory / GB:.3g} GB each: {least.layout} needs "
            f"{least.bytes / GB:.2f} GB; what would do: --memory {math.ceil(1e-6 * least.bytes)}MB for each "
            "device; a smaller --micro-batch-size, which changes what norms see; or more devices (--gpus)"
        )

    def with_reason(self, each: Candidate, chosen: Candidate) -> Candidate:
        """Why it was not taken."""
        if each.reason or math.isinf(each.seconds):
            return each
        about = "" if each.simulated else "not simulated: about "
        slower = each.seconds / chosen.seconds
        if each.seconds > AS_FAST * self._slowest:
            reason = f"{about}{each.seconds / self._slowest:.2f} times the step of one device"
        elif self._preferred(each) > self._preferred(chosen):
            reason = f"{about}{each.bytes / chosen.bytes:.2f} times its memory"
        elif each.simulated and slower <= AS_FAST:
            reason = "takes as long within 1 %, and is no simpler"
        else:
            reason = f"{about}{slower:.2f} times its step"
        return replace(each, reason=reason)
