"""What a run saves: its checkpoints, the best one among them, and what becomes of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from megasnn import checkpoint
from megasnn.config import PretrainConfig
from megasnn.config.identity import NORMALISATION, identity, normalisation, recipe
from megasnn.engine import Engine
from megasnn.engine.faults import another_failed
from megasnn.random import GENERATOR
from megasnn.training.starting import Best, Claim, StartingPoint


class Saves:
    """Checkpoints of one run. Making one is collective.

    Args:
        claim: of the folder to save in; None: nothing is saved.
        place: what a place in the data refers to; see `megasnn.training.data`.
        begin: where the run has started.
        report: takes lines for the user; may be called from another thread.
        complete: the same for iteration and path of each checkpoint that is complete.
    """

    def __init__(
        self,
        config: PretrainConfig,
        engine: Engine,
        claim: Claim | None,
        place: Mapping[str, object],
        begin: StartingPoint,
        report: Callable[[str], None],
        complete: Callable[[int, Path], None],
    ) -> None:
        options = config.checkpoint
        self._keeps_best, self._engine, self._claim, self._report = options.keep_best, engine, claim, report
        self._model, self._identity = config.model.name, identity(config)
        self._extra = {**place, "recipe": recipe(config), "generator": GENERATOR}
        if (constants := normalisation(config)) is not None:
            self._extra[NORMALISATION] = constants
        self._best = self._best_before = begin.best
        self._saved_best = begin.best if begin.saved else None
        self._saves_best = False
        self._saver: checkpoint.SyncWriter | None = None
        if claim is not None:
            writer = checkpoint.AsyncWriter if options.async_save else checkpoint.SyncWriter
            self._saver = writer(
                claim.folder,
                process_group=engine.state.world.handle,
                retention=checkpoint.Retention(options.keep_last, options.keep_every, claim.others),
                report=self._tell,
                complete=complete,
                saved=begin.iteration if begin.saved else None,
            )

    def _tell(self, text: str) -> None:
        """What becomes of a save; that one fails because another rank has ended was told as the reason to end."""
        if not another_failed():
            self._report(text)

    def save(self, iteration: int, consumed_samples: int, skipped_steps: int, owes_evaluation: bool = False) -> None:
        """Saves unless this iteration is saved already, or tells why it cannot be. Collective.

        Args:
            skipped_steps: since the save before, steps that were not finite.
            owes_evaluation: an evaluation is due after this iteration, and the run that goes on makes it first.
        """
        if self._saver is None:
            return
        self._settle_best()
        extra = dict(self._extra)
        if self._best is not None:
            extra["best"] = asdict(self._best)
        if owes_evaluation:
            extra["owes_evaluation"] = True
        layout = self._engine.checkpoints.layout()
        progress = checkpoint.Progress(
            iteration, consumed_samples, self._model, self._identity, layout, extra, skipped_steps
        )
        self._saves_best = self.at_best(iteration) and self._best != self._saved_best
        self._saver.save(progress, self._engine.checkpoints.state, self._saves_best)

    def found(self, iteration: int, accuracy: float) -> None:
        """An evaluation of this iteration found this share of right answers, the same on every rank."""
        self._settle_best()
        if self._keeps_best and (self._best is None or accuracy > self._best.accuracy_top1):
            self._best_before, self._best = self._best, Best(iteration, accuracy)

    def _settle_best(self) -> None:
        """A best that could not be saved does not count. Waits for it while it is being saved."""
        if self._saves_best and self._saver is not None:
            self._saver.finish()
            if self._saver.failed:
                self._best = self._best_before
            self._saves_best = False

    def at_best(self, iteration: int) -> bool:
        """Whether this iteration is the best so far, and is to be kept as that."""
        return self._best is not None and self._best.iteration == iteration

    def finish(self, seconds: float | None = None) -> bool:
        """Waits for what is being saved; False when the save that was asked for last has failed. Collective.

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
