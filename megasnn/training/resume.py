"""Checkpoints of a run: the one it starts from, those it saves, and the best of them."""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from megasnn.checkpoint.folder import FolderLock, forget_best_after, go_back, list_checkpoints, resolve
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
    samples,
)
from megasnn.data.datasets import class_difference
from megasnn.engine import Engine
from megasnn.parallel.agreement import broadcast_result, run_on_all_ranks
from megasnn.parallel_state import ParallelState
from megasnn.telemetry.reporter import Reporter
from megasnn.training.data import RunData


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
    except Exception:
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
    """The best evaluation so far, as a checkpoint keeps it.

    Attributes:
        evaluation: what its accuracy refers to (`RunData.evaluation`); with another one it is not compared.
    """

    iteration: int
    accuracy_top1: float
    evaluation: Mapping[str, object]

    @classmethod
    def read(cls, saved: object) -> Best | None:
        """Reads what a checkpoint keeps; None where it keeps none. Old ones do not say of which evaluation it is."""
        match saved:
            case {"iteration": int(iteration), "accuracy_top1": float(accuracy), **others}:
                evaluation = others.get("evaluation")
                return cls(iteration, accuracy, evaluation if isinstance(evaluation, dict) else {})
        return None


@dataclass(frozen=True)
class StartingPoint:
    """Starting point of a run.

    Attributes:
        notice: for the user; "" where it is as asked for.
        best: the best evaluation before.
        saved: True where a checkpoint in the folder of --save is of this very state.
        averaged: True where the weights are the average of a checkpoint's.
    """

    notice: str = ""
    best: Best | None = None
    saved: bool = False
    averaged: bool = False


@error_context("while loading")
def load_start(config: PretrainConfig, engine: Engine, data: RunData, restarted: bool) -> StartingPoint:
    """Fills the engine with what the run starts from: where a restarted job stood, a checkpoint, or SpikingJelly's
    weights; otherwise the keyed initial values stay. Collective."""
    options = config.checkpoint
    if restarted:
        return _continue(config, engine, data, restarted)
    if options.load and options.loads_weights:
        engine.load_state_dict(config.model.from_spikingjelly(read_state_dict(options.load)))
    elif options.load and options.finetune:
        return _take_weights(config, engine, data, options.load)
    elif options.load:
        return _continue(config, engine, data, restarted)
    return StartingPoint()


def _continue(config: PretrainConfig, engine: Engine, data: RunData, restarted: bool) -> StartingPoint:
    """Goes on from the checkpoint that was asked for; a restarted job from its latest."""
    options, evaluates_only, state = config.checkpoint, config.training.evaluate_only, engine.checkpoints.state
    folder = str(options.save if restarted else options.load)
    try:
        loaded = load_checkpoint(
            folder,
            LocalState(state.tensors) if evaluates_only else state,
            step=None if restarted else options.ckpt_step,
            process_group=engine.state.world.handle,
            check=partial(_problems, config, data.data_position),
            average=evaluates_only and options.ema,
        )
    except NoCheckpointError:
        if not options.may_begin_anew:
            raise
        return StartingPoint(
            f"WARNING: there is no checkpoint in {folder}, so training starts from initial weights, with the model of "
            "the flags; where there should be one, stop and check --load"
        )
    samples = 0 if evaluates_only else loaded.consumed_samples
    engine.step.loaded((loaded.iteration, samples), loaded.averaged_steps)
    if evaluates_only:
        notice = _warnings((*loaded.remarks, *changed_samples(loaded.extra, config)))
        return StartingPoint(notice, averaged=loaded.averaged_steps is not None)
    goes_on_there = restarted or options.saves_where_it_loads
    before = Best.read(loaded.extra.get("best"))

    def name() -> None:
        if options.ckpt_step is not None and not restarted:
            go_back(Path(folder), loaded.iteration)
        forget_best_after(Path(folder), loaded.iteration, before.iteration if before is not None else None)

    if goes_on_there:
        broadcast_result(engine.state.world.handle, name)
    best, of_best = _comparable(before, data.evaluation) if options.keep_best else (None, [])
    return StartingPoint(
        _warnings((*loaded.remarks, *changed_recipe(loaded.extra, config), *of_best)),
        best,
        # Loaded as it is: a run that has nothing left to do does not write it again.
        goes_on_there and not loaded.remarks,
    )


def _comparable(best: Best | None, evaluation: Mapping[str, object]) -> tuple[Best | None, list[str]]:
    """The best so far, and a remark: None where it is the best of another evaluation."""
    if best is None or best.evaluation == evaluation:
        return best, []
    changed = [name for name, value in evaluation.items() if best.evaluation.get(name) != value]
    remark = (
        f"the best checkpoint so far, of iteration {best.iteration} with {best.accuracy_top1:.2%}, was found by "
        f"another evaluation ({', '.join(changed)}): --keep-best begins anew"
    )
    return None, [remark]


def _take_weights(config: PretrainConfig, engine: Engine, data: RunData, folder: str) -> StartingPoint:
    """Takes only the weights, of a model whose tensors fit.

    A last layer of another shape stays as initialised, and so does a first convolution of other input channels."""
    layers = engine.distributed.description.layers
    shapes = {entry.name: entry.shard.global_shape for entry in engine.distributed.description.tensors}
    of_first = {name for name in shapes if name.startswith(f"{layers[0].name}.")}
    of_head = {name for name in shapes if name.startswith(f"{layers[-1].name}.")}
    left: set[str] = set()

    def leave(saved: Metadata) -> set[str]:
        before = {name: tensor.shape for name, tensor in saved.tensors.items() if name in shapes}
        left.clear()  # of a damaged one that was tried first
        left.update(n for n in of_first & before.keys() if _differ_in_channels(before[n], shapes[n]))
        if any(before[n] != shapes[n] for n in of_head & before.keys()):
            left.update(of_head)
        return left

    loaded = load_checkpoint(
        folder,
        LocalState(engine.distributed.tensors),
        step=config.checkpoint.ckpt_step,
        process_group=engine.state.world.handle,
        check=lambda saved: model_differences(saved, config.model.name, None),
        leave=leave,
        average=config.checkpoint.ema,
    )
    engine.step.loaded()
    remarks = [*loaded.remarks, *changed_samples(loaded.extra, config)]
    if left & of_first - of_head:
        names = ", ".join(sorted(left & of_first - of_head))
        remarks.append(f"{names} is of other input channels in the checkpoint: it stays as it is initialised")
    if left & of_head:
        remarks.append(f"{layers[-1].name} is of another shape in the checkpoint: it stays as it is initialised")
    elif different := _class_difference(data.data_position, loaded.extra):
        remarks.append(f"{different} in the checkpoint and in the data, and {layers[-1].name} keeps its weights")
    averaged = loaded.averaged_steps is not None
    taken = "average of the weights (--no-ema: the weights)" if averaged else "weights"
    notices = [f"--finetune takes the {taken} of {loaded.path}", *([_warnings(remarks)] if remarks else [])]
    return StartingPoint("\n".join(notices))


def _differ_in_channels(before: Sequence[int], now: Sequence[int]) -> bool:
    """True for weights of convolutions that differ in the number of their input channels alone."""
    return len(before) == len(now) > 2 and [n for n in range(len(now)) if before[n] != now[n]] == [1]


def _problems(config: PretrainConfig, data_position: Mapping[str, object], saved: Metadata) -> Iterator[str]:
    """Yields differences of the model; unless it only evaluates, of the data and its order, to which the checkpoint's
    position refers."""
    yield from model_differences(saved, config.model.name, config_identity(config))
    if different := _class_difference(data_position, saved.extra):
        yield (
            f"{different} when it was saved and in the data now: make the shards again, with --classes-of and the "
            "folder that was trained on"
        )
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


def _class_difference(data_position: Mapping[str, object], saved: Mapping[str, object]) -> str:
    """First class number whose name differs between a checkpoint and the data; "" where a list is not known."""
    before, now = saved.get(CLASS_NAMES), data_position.get(CLASS_NAMES)
    if not isinstance(before, list) or not isinstance(now, list):
        return ""
    return class_difference(before, now) or ""


def _warnings(remarks: Iterable[str]) -> str:
    return "\n".join(f"WARNING: {remark}" for remark in remarks)


class Saves:
    """Checkpoints of one run. Making one is collective. Without a claim of a folder nothing is saved."""

    def __init__(
        self,
        config: PretrainConfig,
        engine: Engine,
        claim: Claim | None,
        data: RunData,
        begin: StartingPoint,
        reporter: Reporter,
    ) -> None:
        options = config.checkpoint
        self._keeps_best, self._engine, self._claim = options.keep_best, engine, claim
        self._extra = {**data.data_position, SAMPLES_KEY: samples(config)}
        self._evaluation = data.evaluation
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
            self._best = Best(iteration, accuracy, self._evaluation)

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
