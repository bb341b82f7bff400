"""The search: every layout by an estimate, the best simulated, and the reasons against the others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter

from megasnn.common.files import quantity
from megasnn.config import PretrainConfig
from megasnn.config.checks import flag
from megasnn.planner.candidates import Candidate, Layout, Prefer, layouts, set_flags
from megasnn.planner.costs_file import Analysis
from megasnn.planner.machines import GB, Cluster
from megasnn.planner.predict import Predicted, Predictor
from megasnn.schedule.passes import NEVER

AS_FAST = 1.01  # ratio of step times that the planner cannot tell apart
NEAR = 1.1  # times the memory: up to here an estimate may be too large, and a simulation decides
SLOWER = 1.3  # times the fastest step: a grid whose computations alone take longer has no chance
TRIED = 3  # simulations for each layout that is to fit
MOST_COMPUTATIONS = 40_000  # of a simulated schedule
MOST_REASONS = 4  # in the message of a search without a result
SECONDS = attrgetter("seconds")
BYTES = attrgetter("bytes")


class PlanError(ValueError):
    """No plan. The message has the missing memory, and the changes to make."""


class Search:
    """Candidates and their ranking."""

    def __init__(
        self,
        analysis: Analysis,
        config: PretrainConfig,
        cluster: Cluster,
        prefer: Prefer,
        sizes: Sequence[int],
    ) -> None:
        self._analysis = analysis
        self._config = config
        self._cluster = cluster
        self._prefer = prefer
        self._sizes = sizes
        self._predictor = Predictor(analysis, config, cluster)
        self._fastest = math.inf  # estimated seconds of the fastest step so far that fits
        self._slowest = math.inf  # seconds of one device, if it fits: the limit with `memory` and `capacity`
        self._simulated: dict[Layout, tuple[Candidate, Predicted | None]] = {}

    def best(self, simulations: int) -> tuple[Candidate, Predicted, list[Candidate], int]:
        """Returns the best candidate, its step, all candidates, and the number of simulated ones.

        Args:
            simulations: number of fitting layouts to simulate.
        Raises:
            PlanError: no layout fits, or none is possible.
        """
        estimated = list(self._estimates())
        fitting = sorted((each for each in estimated if not each.reason), key=self.rank)
        smallest = sorted((each for each in estimated if not math.isinf(each.bytes)), key=BYTES)[:simulations]
        alone = sorted((each for each in fitting if each.layout.ranks == 1), key=SECONDS)[:1]
        # A layout that takes longer than one device gains nothing by its memory.
        if alone and self._prefer != "speed":
            one_device = self._simulate(alone[0])
            if not one_device.reason:
                self._slowest = one_device.seconds
        # Where no simulation fits, the smallest layouts are tried, because their estimates may be too large.
        for each in chain(alone, fitting[: TRIED * simulations], smallest):
            if len(self._able()) >= simulations:
                break
            if each.layout not in self._simulated:
                self._simulate(each)
        chosen = self._chosen()
        found = [self._simulated.get(each.layout, (each, None))[0] for each in estimated]
        if chosen is None:
            raise PlanError(self._why_none(found))
        predicted = self._simulated[chosen.layout][1]
        assert predicted is not None, "it was simulated"
        return chosen, predicted, found, len(self._simulated)

    def _estimates(self) -> Iterator[Candidate]:
        counts = self._cluster.counts()
        knows_graphs = self._cluster.machine.graph_start is not None
        for layout, refused in layouts(
            self._analysis, self._config, counts, self._sizes, self._may_be_best, knows_graphs
        ):
            each = Candidate(layout, reason=refused) if refused else self._estimated(layout)
            if not each.reason:
                # The grids to come are held against it in `_may_be_best`.
                self._fastest = min(self._fastest, each.seconds)
            yield each

    def _estimated(self, layout: Layout) -> Candidate:
        try:
            seconds, need = self._predictor.estimate(layout)
        except ValueError as error:
            return Candidate(layout, reason=str(error))
        return Candidate(layout, seconds, need, reason=self._misfit(need, NEAR))

    def _may_be_best(self, plain: Layout) -> bool:
        """False for a grid that must be slower than the fastest step. One device is always considered."""
        if self._prefer != "speed" or plain.ranks == 1:
            return True
        return self._predictor.least_seconds(plain) < SLOWER * self._fastest

    def _misfit(self, need: float, near: float = 1.0) -> str:
        limit = self._cluster.machine.memory
        if need <= near * limit:
            return ""
        return f"needs {need / GB:.2f} GB a rank, and there are {limit / GB:.2f}"

    def rank(self, each: Candidate) -> tuple[object, ...]:
        """Sort key, best first: layouts that fit, then the preferred quantity; impossible ones last."""
        if math.isinf(each.seconds):
            return (2,)
        misfits = bool(self._misfit(each.bytes))
        parts = each.layout.parts
        # Steps within 1 % are as fast, and the simplest of them is first.
        step = round(100 * math.log(max(each.seconds, 1e-12)))
        if self._prefer == "memory":
            return misfits, each.bytes, each.seconds, parts
        if self._prefer == "capacity":
            return misfits, -self.largest_micro_batch(each), step, parts, each.seconds
        return misfits, step, parts, -each.layout.micro_batch_size, each.seconds, each.bytes

    def largest_micro_batch(self, each: Candidate) -> int:
        """Most samples within the memory. All bytes besides the states grow with the samples."""
        states = self._predictor.without_samples(each.layout)
        growing = max(each.bytes - states, 1.0)
        return max(0, int(each.layout.micro_batch_size * (self._cluster.machine.memory - states) / growing))

    def _simulate(self, each: Candidate) -> Candidate:
        found = each
        predicted = None
        segments = len(each.layout.placement)
        if each.layout.recompute != NEVER or each.layout.grid.dp_shard > 1:
            # These schedules go layer by layer.
            segments = len(self._analysis.layers)
        # A forward, an input gradient and a weight gradient for each segment.
        if 3 * self._predictor.micro_batches(each.layout) * segments > MOST_COMPUTATIONS:
            found = replace(each, reason="too many computations to simulate")
        else:
            try:
                predicted = self._predictor.predict(each.layout)
            except ValueError as error:
                # A schedule that cannot place the layers.
                found = replace(each, seconds=math.inf, bytes=math.inf, reason=str(error))
        if predicted is not None:
            tensors = max(1e6 * (rank.total - rank.program) for rank in predicted.memory)
            need = self._predictor.with_program(tensors)
            seconds = predicted.time.total
            found = replace(each, seconds=seconds, bytes=need, simulated=True, reason=self._misfit(need))
        self._simulated[each.layout] = found, predicted
        return found

    def _preferred(self, each: Candidate) -> float:
        if self._prefer == "memory":
            return each.bytes
        if self._prefer == "capacity":
            return float(-self.largest_micro_batch(each))
        return 0.0

    def _able(self) -> list[Candidate]:
        """Simulated candidates that fit and are not slower than one device."""
        able = []
        longest = AS_FAST * self._slowest
        for each, _ in self._simulated.values():
            if each.simulated and not each.reason and each.seconds <= longest:
                able.append(each)
        return able

    def _chosen(self) -> Candidate | None:
        """The simplest candidate within 1 % of the fastest, among candidates with the least preferred quantity.

        Equally simple ones: larger micro-batches first.
        """
        able = self._able()
        least = min(map(self._preferred, able), default=0.0)
        able = [each for each in able if self._preferred(each) == least]
        longest = AS_FAST * min(map(SECONDS, able), default=0.0)
        fastest = [each for each in able if each.seconds <= longest]

        def simplicity(each: Candidate) -> tuple[float, ...]:
            return each.layout.parts, -each.layout.micro_batch_size, each.seconds, each.bytes

        return min(fastest, key=simplicity, default=None)

    def _why_none(self, considered: Sequence[Candidate]) -> str:
        devices = f"no layout of {quantity(self._cluster.ranks, 'device')}"
        simulated = [each for each in considered if each.simulated]
        if not simulated:
            parallel = self._config.parallel
            given = ", ".join(f"{flag(name)} {getattr(parallel, name)}" for name in set_flags(parallel))
            reasons = Counter(each.reason for each in considered if each.reason).most_common(MOST_REASONS)
            listed = "; ".join(reason for reason, _ in reasons) or f"none has {given}; leave some of these out"
            return f"{devices} is possible: {listed}"
        least = min(simulated, key=BYTES)
        return (
            f"{devices} fits into {self._cluster.machine.memory / GB:.3g} GB each: {least.layout} needs "
            f"{least.bytes / GB:.2f} GB: give --memory {math.ceil(1e-6 * least.bytes)}MB for each device, a smaller "
            "--micro-batch-size (norms then see fewer samples), or more devices (--gpus)"
        )

    def with_reason(self, each: Candidate, chosen: Candidate) -> Candidate:
        """Adds the reason against a candidate."""
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
