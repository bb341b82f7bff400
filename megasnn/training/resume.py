"""Checkpoints of a run: the one it starts from, those it saves, and the best of them."""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from megasnn.checkpoint.folder import FolderLock, go_back, list_checkpoints, resolve
from megasnn.checkpoint.format import Metadata
from megasnn.checkpoint.load import load_checkpoint, model_differences
from megasnn.checkpoint.optimizer_state import LocalState
from megasnn.checkpoint.save import Writer
from megasnn.checkpoint.source import read_state_dict
from megasnn.common.checks import error_context
from megasnn.common.files import CheckpointError, NoCheckpointError, in_message
from megasnn.config import PretrainConfig
from megasnn.config.values import (
    CLASS_NAMES,
    SAMPLES_KEY,
    changed_recipe,
    changed_samples,
    config_identity,
    recipe,
    samples,
)
from megasnn.data.datasets import class_difference
from megasnn.engine import Engine
from megasnn.parallel.agreement import broadcast_result, run_on_all_ranks
from megasnn.parallel_state import ParallelState
from megasnn.telemetry.reporter import Reporter


@error_context("while looking at the checkpoint of --load")
def require_checkpoint(config: PretrainConfig, state: ParallelState) -> None:
    """Raises CheckpointError on every rank for a --load without a checkpoint, before anything is built. Collective."""
    options = config.checkpoint

    def require() -> None:
        if not (options.save and list_checkpoints(Path(options.save))):  # a restarted job goes on there
            resolve(Path(str(options.load)), options.ckpt_step)

    if options.load and not options.loads_weights and not options.may_begin_anew:
        broadcast_result(state.world.handle, require)


@dataclass(frozen=True)
class Claim:
    """The folder of --save, which no other run saves in meanwhile. The first rank's `job` holds the lock.

    Attributes:
        resumes: this is a job that goes on after a restart.
        notice: for the user; "" when nothing.
    """

    folder: Path
    job: FolderLock | None
    resumes: bool
    notice: str

    def release(self) -> None:
        """Ends the claim with the run."""
        if self.job is not None:
            self.job.release()


@error_context("while claiming the folder of --save")
def claim(config: PretrainConfig, state: ParallelState) -> Claim | None:
    """Claims the folder of --save; None without one, and where nothing is saved. Collective.

    Raises:
        CheckpointError: on every rank: another run saves there, nobody can, it has checkpoints that this run does not
            continue, or hosts see other folders.
    """
    options = config.checkpoint
    if not options.save or config.training.evaluate_only:
        return None
    folder, continues = Path(options.save), options.saves_where_it_loads and not options.finetune
    job: FolderLock | None = None

    def by_first() -> tuple[bool, str]:
        nonlocal job
        job = FolderLock(folder, continues)
        return job.resumes, job.notice

    decided = broadcast_result(state.world.handle, by_first)
    claimed = Claim(folder, job, *decided)
    try:
        _require_shared(folder, state)
    except CheckpointError:
        claimed.release()
        raise
    return claimed


def _require_shared(folder: Path, state: ParallelState) -> None:
    """Raises CheckpointError on every rank where a rank sees another folder by this name than the first. Collective."""
    group = state.world.handle
    mark = folder / f".shared_{broadcast_result(group, secrets.token_hex)}"

    def see() -> None:
        if state.rank == 0:
            mark.touch()
        for _ in range(30):  # within 3 s a host has to see a file of another one
            with suppress(OSError):
                if mark.name in os.listdir(folder):
                    return
            time.sleep(0.1)
        raise CheckpointError(f"{platform.node()} (rank {state.rank})")

    try:
        run_on_all_ranks(
            group, see, f"--save {folder} must be one folder that all hosts share; these see another one, or none:"
        )
    finally:
        if state.rank == 0:
            mark.unlink(missing_ok=True)


@dataclass(frozen=True)
class Best:
    """The best evaluation so far, as a checkpoint keeps it."""

    iteration: int
    accuracy_top1: float

    @classmethod
    def read(cls, saved: object) -> Best | None:
        """Reads what a checkpoint keeps; None where it keeps none."""
        match saved:
            case {"iteration": int(iteration), "accuracy_top1": float(accuracy)}:
                return cls(iteration, accuracy)
        return None


@dataclass(frozen=True)
class StartingPoint:
    """Starting point of a run.

    Attributes:
        notice: for the user; "" where it is as asked for.
        best: the best evaluation before.
        saved: True where a checkpoint in the folder of --save is of this very state.
    """

    notice: str = ""
    best: Best | None = None
    saved: bool = False


@error_context("while loading")
def load_start(
    config: PretrainConfig, engine: Engine, data_position: Mapping[str, object], restarted: bool
) -> StartingPoint:
    """Fills the engine with what the run starts from: where a restarted job stood, a checkpoint, or SpikingJelly's
    weights; otherwise the keyed initial values stay. Collective.

    Args:
        data_position: identity of the data and its order; see `megasnn.training.data`.
    """
    options = config.checkpoint
    if restarted:
        return _continue(config, engine, data_position, restarted)
    if options.load and options.loads_weights:
        engine.load_state_dict(config.model.from_spikingjelly(read_state_dict(options.load)))
    elif options.load and options.finetune:
        return _take_weights(config, engine, options.load)
    elif options.load:
        return _continue(config, engine, data_position, restarted)
    return StartingPoint()


def _continue(
    config: PretrainConfig, engine: Engine, data_position: Mapping[str, object], restarted: bool
) -> StartingPoint:
    """Goes on from the checkpoint that was asked for; a restarted job from its latest."""
    options, evaluates_only, state = config.checkpoint, config.training.evaluate_only, engine.checkpoints.state
    folder = str(options.save if restarted else options.load)
    try:
        loaded = load_checkpoint(
            folder,
            replace(state, optimizer=None) if evaluates_only else state,
            step=None if restarted else options.ckpt_step,
            process_group=engine.state.world.handle,
            check=partial(_problems, config, data_position),
        )
    except NoCheckpointError:
        if not options.may_begin_anew:
            raise
        return StartingPoint(
            f"WARNING: there is no checkpoint in {folder}, so training starts from initial weights, with the model of "
            "the flags; where there should be one, stop and check --load"
        )
    if evaluates_only and engine.step.average is not None and not loaded.averaged:
        raise CheckpointError(f"{loaded.path} holds no average of the weights to evaluate: leave --ema-decay out")
    samples = 0 if evaluates_only else loaded.consumed_samples
    engine.step.loaded((loaded.iteration, samples), loaded.averaged)
    if evaluates_only:
        return StartingPoint(_warnings((*loaded.remarks, *changed_samples(loaded.extra, config))))
    if options.ckpt_step is not None and options.saves_where_it_loads and not restarted:
        broadcast_result(engine.state.world.handle, lambda: go_back(Path(folder), loaded.iteration))
    return StartingPoint(
        _warnings((*loaded.remarks, *changed_recipe(loaded.extra, recipe(config)))),
        Best.read(loaded.extra.get("best")) if options.keep_best else None,
        # Loaded as it is: a run that has nothing left to do does not write it again.
        (restarted or options.saves_where_it_loads) and not loaded.remarks,
    )


def _take_weights(config: PretrainConfig, engine: Engine, folder: str) -> StartingPoint:
    """Takes only the weights, of a model whose tensors fit; a last layer of another shape stays as initialised."""
    distributed, other_head = engine.distributed, False
    head = distributed.description.layers[-1].name
    shapes = {entry.name: entry.shard.global_shape for entry in distributed.description.tensors}
    of_head = {name for name in shapes if name.startswith(f"{head}.")}

    def leave(saved: Metadata) -> set[str]:
        nonlocal other_head
        other_head = any(saved.tensors[n].shape != shapes[n] for n in of_head & saved.tensors.keys())
        return of_head if other_head else set()

    loaded = load_checkpoint(
        folder,
        LocalState(distributed.tensors),
        step=config.checkpoint.ckpt_step,
        process_group=engine.state.world.handle,
        check=lambda saved: model_differences(saved, config.model.name, None),
        leave=leave,
    )
    engine.step.loaded()
    remarks = [*loaded.remarks, *changed_samples(loaded.extra, config)]
    if other_head:
        remarks.append(f"{head} is of another shape in the checkpoint: it stays as it is initialised")
    return StartingPoint(_warnings(remarks))


def _problems(config: PretrainConfig, data_position: Mapping[str, object], saved: Metadata) -> Iterator[str]:
    """Yields differences of the model; unless it only evaluates, of the data and its order, to which the checkpoint's
    position refers."""
    yield from model_differences(saved, config.model.name, config_identity(config))
    yield from _class_problems(data_position, saved)
    if config.training.evaluate_only:
        return
    if not saved.extra.keys() & data_position.keys():
        yield "it keeps no place in the data, as a megasnn.Engine has none: --finetune takes its weights only"
        return
    for name, value in data_position.items():
        if name != CLASS_NAMES and saved.extra.get(name) != value:
            before = in_message(saved.extra.get(name))
            yield (
                f"{name}: {before} when it was saved, {value} now: in other data or another order "
                "its place in the data means nothing (--finetune takes its weights only)"
            )


def _class_problems(data_position: Mapping[str, object], saved: Metadata) -> Iterator[str]:
    """Yields a class number that stood for another class in the training that saved; where both lists are known."""
    before, now = saved.extra.get(CLASS_NAMES), data_position.get(CLASS_NAMES)
    if isinstance(before, list) and isinstance(now, list) and (different := class_difference(before, now)):
        yield (
            f"{different} when it was saved and in the data now: make the shards again, with --classes-of and the "
            "folder that was trained on"
        )


def _warnings(remarks: Iterable[str]) -> str:
    return "\n".join(f"WARNING: {remark}" for remark in remarks)


class Saves:
    """Checkpoints of one run. Making one is collective. Without a claim of a folder nothing is saved."""

    def __init__(
        self,
        config: PretrainConfig,
        engine: Engine,
        claim: Claim | None,
        data_position: Mapping[str, object],
        begin: StartingPoint,
        reporter: Reporter,
    ) -> None:
        options = config.checkpoint
        self._keeps_best, self._engine, self._claim = options.keep_best, engine, claim
        self._extra = {**data_position, SAMPLES_KEY: samples(config)}
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
