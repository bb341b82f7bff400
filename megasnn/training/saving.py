"""A run's saved checkpoints, and their best by validation."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megasnn.checkpoint.lock import FolderLock
from megasnn.checkpoint.writer import Writer
from megasnn.config import PretrainConfig
from megasnn.config.run import CheckpointConfig
from megasnn.config.values import SAMPLES_KEY, samples
from megasnn.engine import Engine
from megasnn.telemetry.reporter import Reporter
from megasnn.training.data import RunData


@dataclass(frozen=True)
class Best:
    """Best evaluation so far, as a checkpoint keeps it.

    Attributes:
        evaluation: identity (`RunData.evaluation`). Accuracies with different identities are not compared.
    """

    iteration: int
    accuracy_top1: float
    evaluation: Mapping[str, object]

    @classmethod
    def read(cls, entry: object) -> Best | None:
        """Reads a checkpoint's entry; None without one. Old checkpoints do not identify the evaluation."""
        match entry:
            case {"iteration": int(iteration), "accuracy_top1": float(accuracy), **others}:
                evaluation = others.get("evaluation")
                if not isinstance(evaluation, dict):
                    evaluation = {}
                return cls(iteration, accuracy, evaluation)
        return None


class Saves:
    """One run's checkpoints. Making one is collective.

    Args:
        lock: for the --save folder, on the first rank; released at the end.
        best: best evaluation before this run.
        is_saved: the --save folder has a checkpoint with this very state already.
    """

    def __init__(
        self,
        config: PretrainConfig,
        engine: Engine,
        data: RunData,
        reporter: Reporter,
        lock: FolderLock | None,
        best: Best | None,
        is_saved: bool,
    ) -> None:
        options = config.checkpoint
        self._keeps_best = options.keep_best
        self._engine = engine
        self._lock = lock
        # When the run continues, another order of samples is refused, and another preprocessing only reported.
        self._extra = {**data.data_position, SAMPLES_KEY: samples(config)}
        self._evaluation = data.evaluation
        self._best = best
        self._saved_best = None
        saved_iteration = None
        if is_saved:
            self._saved_best = best
            saved_iteration = engine.iteration
        self._writer: Writer | None = None
        if options.save and not config.training.evaluate_only:
            self._writer = Writer(
                Path(options.save),
                process_group=engine.state.world.handle,
                background=options.async_save,
                keep_last=options.keep_last,
                keep_every=options.keep_every,
                report=reporter.line,
                complete=reporter.report_save,
                saved_iteration=saved_iteration,
            )

    def save(self, skipped_steps: int) -> None:
        """Saves unless this iteration is saved already. A failure is reported, and the run continues. Collective.

        Args:
            skipped_steps: not finite, since the last save.
        """
        if self._writer is None:
            return
        best = {} if self._best is None else {"best": asdict(self._best)}
        progress = self._engine.checkpoints.progress({**self._extra, **best}, skipped_steps)
        # A best that is saved already, as after a restart, needs no second save.
        is_best = self.is_best(self._engine.iteration) and self._best != self._saved_best
        if is_best:
            self._saved_best = self._best
        self._writer.save(progress, self._engine.checkpoints.state, is_best)

    def consider(self, iteration: int, accuracy: float) -> None:
        """Compares top-1 accuracy, the same on every rank, with the best so far."""
        if self._keeps_best and (self._best is None or accuracy > self._best.accuracy_top1):
            self._best = Best(iteration, accuracy, self._evaluation)

    def is_best(self, iteration: int) -> bool:
        """Whether to keep this iteration as the best so far."""
        return self._best is not None and self._best.iteration == iteration

    def finish(self, seconds: float | None = None) -> bool:
        """Waits for a background save; False when the last save has failed. Collective.

        Args:
            seconds: longest wait, after which nothing more can be saved.
        """
        if self._writer is None:
            return True
        self._writer.finish(seconds)
        return not self._writer.failed

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        # Last: until then no other run may write into the folder.
        if self._lock is not None:
            self._lock.release()


def how_to_go_on(options: CheckpointConfig, succeeded: bool) -> str:
    """Sentence after a run's early end."""
    if not options.save:
        return "nothing is saved without --save: the same command begins anew"
    if not succeeded:
        return "the last checkpoint could not be written: the run goes on from the one before it"
    folder = shlex.quote(options.save)
    text = f"to go on, give the same command with --load {folder} --save {folder}"
    # Flags about the start that a run which continues would refuse, or take for another start.
    dropped = []
    if options.finetune:
        dropped.append("--finetune")
    if options.ckpt_step is not None:
        dropped.append("--ckpt-step")
    if not options.ema:
        dropped.append("--no-ema")
    if dropped:
        text += f", without {' and '.join(dropped)}"
    return text
