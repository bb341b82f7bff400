"""Checkpoints of a run, and the best one among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from megasnn.checkpoint.writer import Writer
from megasnn.config import PretrainConfig
from megasnn.config.identity import SAMPLES, samples
from megasnn.engine import Engine
from megasnn.telemetry.reporter import Reporter
from megasnn.training.resume import Best, Claim, StartingPoint


class Saves:
    """Checkpoints of one run. Making one is collective. Without a claim of a folder nothing is saved."""

    def __init__(
        self,
        config: PretrainConfig,
        engine: Engine,
        claim: Claim | None,
        place: Mapping[str, object],
        begin: StartingPoint,
        reporter: Reporter,
    ) -> None:
        options = config.checkpoint
        self._keeps_best, self._engine, self._claim = options.keep_best, engine, claim
        self._extra = {**place, SAMPLES: samples(config)}
        self._best, self._saved_best = begin.best, begin.best if begin.saved else None
        self._saver: Writer | None = None
        if claim is not None:
            self._saver = Writer(
                claim.folder,
                process_group=engine.state.world.handle,
                background=options.async_save,
                keep_last=options.keep_last,
                keep_every=options.keep_every,
                report=reporter.line,
                complete=reporter.saved,
                saved=engine.iteration if begin.saved else None,
            )

    def save(self, skipped_steps: int) -> None:
        """Saves unless this iteration is saved already; a save that fails is reported, and the run goes on. Collective.

        Args:
            skipped_steps: since the save before, steps that were not finite.
        """
        if self._saver is None:
            return
        best = {} if self._best is None else {"best": asdict(self._best)}
        progress = self._engine.checkpoints.progress({**self._extra, **best}, skipped_steps)
        is_best = self.at_best(self._engine.iteration) and self._best != self._saved_best
        self._saved_best = self._best if is_best else self._saved_best
        self._saver.save(progress, self._engine.checkpoints.state, is_best)

    def found(self, iteration: int, accuracy: float) -> None:
        """Takes the share of right answers of an evaluation, the same on every rank."""
        if self._keeps_best and (self._best is None or accuracy > self._best.accuracy_top1):
            self._best = Best(iteration, accuracy)

    def at_best(self, iteration: int) -> bool:
        """Returns True where this iteration is the best so far, and is to be kept as that."""
        return self._best is not None and self._best.iteration == iteration

    def finish(self, seconds: float | None = None) -> bool:
        """Waits for a save in the background; False when the last save has failed. Collective.

        Args:
            seconds: no longer than that, after which nothing more can be saved.
        """
        if self._saver is None:
            return True
        self._saver.finish(seconds)
        return not self._saver.failed

    def close(self) -> None:
        if self._saver is not None:
            self._saver.close()
        if self._claim is not None:
            self._claim.release()
