"""Starting point of a run: a checkpoint, weights alone, or the initial values."""

from __future__ import annotations

import platform
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from megasnn.checkpoint.folder import first_legible, go_back, list_checkpoints, resolve
from megasnn.checkpoint.format import Metadata
from megasnn.checkpoint.job import FolderLock
from megasnn.checkpoint.load import (
    config_differences,
    load_checkpoint,
    load_globals_into,
    model_differences,
    other_model,
)
from megasnn.checkpoint.optimizer_state import LocalState
from megasnn.checkpoint.state_dict import read_state_dict
from megasnn.config import PretrainConfig
from megasnn.config.identity import changed_recipe, changed_samples, identity, recipe
from megasnn.engine import Engine
from megasnn.engine.faults import placed
from megasnn.files import CheckpointError, NoCheckpointError, in_message, raise_problems
from megasnn.layers import ParallelNeuron
from megasnn.parallel.agreement import broadcast_result, gather, run_on_all_ranks
from megasnn.parallel.sharding import owner_name
from megasnn.parallel_state import ParallelState


@placed("while looking at the checkpoint of --load")
def refuse_other_model(config: PretrainConfig, state: ParallelState) -> None:
    """Refuses a --load without a checkpoint, with one of another model, or, to be continued, of other dimensions.

    It comes before anything is built; whatever else is wrong with a checkpoint is found when it is loaded. Collective.

    Raises:
        CheckpointError: on every rank.
    """
    options, model = config.checkpoint, config.model.name

    def refuse() -> None:
        has_saved = options.save is not None and list_checkpoints(Path(options.save))
        if not options.may_begin_anew and not has_saved:  # with checkpoints of its own a restarted job goes on there
            resolve(Path(str(options.load)), options.ckpt_step)
        metadata = first_legible(Path(str(options.load)), options.ckpt_step)
        if metadata is None:
            return
        saved = metadata.model
        if saved not in (None, model):
            raise CheckpointError(f"--load {options.load}: {other_model(saved, model)}")
        if metadata.config is not None and not options.finetune:
            title = (
                f"the checkpoint of --load {options.load} does not fit this run; --finetune takes its weights alone:"
            )
            raise_problems(title, config_differences(metadata.config, identity(config)))

    if options.load and not options.loads_weights:
        broadcast_result(state.world.handle, refuse)


@dataclass(frozen=True)
class Claim:
    """The folder of --save, which no other run saves in meanwhile.

    Attributes:
        folder: of the checkpoints.
        job: holds the lock; only on the first rank.
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


@placed("while claiming the folder of --save")
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
    mark = broadcast_result(group, lambda: leave_mark(folder))

    def see() -> None:
        if not sees_mark(mark):
            raise CheckpointError(f"{platform.node()} (rank {state.rank})")

    try:
        run_on_all_ranks(
            group, see, f"--save {folder} must be one folder that all hosts share; these see another one, or none:"
        )
    finally:
        if state.rank == 0:
            mark.unlink(missing_ok=True)


def leave_mark(folder: Path) -> Path:
    """Creates an empty file by a new name, by which other hosts find out that they see the same folder."""
    mark = folder / f".shared_{secrets.token_hex(8)}"
    mark.touch(exist_ok=False)
    return mark


def sees_mark(mark: Path) -> bool:
    """Returns True when this process sees the folder in which the mark was left.

    A file server refuses to create a file that is there, whatever a host remembers of the folder; looking for it could
    find an old state of the folder for a minute. A file created elsewhere is removed.
    """
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return True
    except OSError:
        return False
    mark.unlink()
    return False


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
        iteration, consumed_samples: done before; 0 at the beginning.
        notice: for the user; "" where it is as asked for.
        averaged: True where the average of the weights was loaded.
        best: the best evaluation before.
        saved: True where a checkpoint in the folder of --save is of this very state.
    """

    iteration: int = 0
    consumed_samples: int = 0
    notice: str = ""
    averaged: bool = False
    best: Best | None = None
    saved: bool = False


class Start:
    """Loads what a run starts from.

    Args:
        place: identity of the data and its order; see `megasnn.training.data`.
    """

    def __init__(self, config: PretrainConfig, engine: Engine, place: Mapping[str, object]) -> None:
        self._config, self._options, self._engine, self._place = config, config.checkpoint, engine, place
        self._world, self._model = engine.state.world.handle, engine.distributed
        self._evaluates_only = config.training.evaluate_only

    @placed("while loading")
    def load(self, restarted: bool) -> StartingPoint:
        """Fills the engine with what the run starts from. Collective.

        That is where a restarted job stood, or a checkpoint, or SpikingJelly's weights; otherwise the keyed initial
        values stay.
        """
        options = self._options
        begin = StartingPoint()
        if restarted:
            begin = self._continue(str(options.save), restarted=True)
        elif options.loads_weights:
            weights = self._config.model.from_spikingjelly(read_state_dict(str(options.load)))
            load_globals_into(self._model.tensors, weights, self._world)
        elif options.load:
            begin = self._take_weights(options.load) if options.finetune else self._continue(options.load)
        self._engine.step.loaded((begin.iteration, begin.consumed_samples), begin.averaged)
        return begin

    def _continue(self, folder: str, restarted: bool = False) -> StartingPoint:
        """Goes on from the checkpoint that was asked for; a restarted job from its latest."""
        options = self._options
        state = self._engine.checkpoints.state
        try:
            loaded = load_checkpoint(
                folder,
                replace(state, optimizer=None) if self._evaluates_only else state,
                step=None if restarted else options.ckpt_step,
                process_group=self._world,
                check=self._problems,
            )
        except NoCheckpointError:
            if not options.may_begin_anew:
                raise
            return StartingPoint(notice=f"no checkpoint in {folder}: starting from the beginning")
        if self._evaluates_only:
            if self._engine.step.average is not None and not loaded.averaged:
                raise CheckpointError(
                    f"{loaded.path} holds no average of the weights to evaluate: leave --ema-decay out"
                )
            remarks = *loaded.remarks, *changed_samples(loaded.extra, self._config)
            return StartingPoint(loaded.iteration, 0, _warnings(remarks), loaded.averaged)
        if options.ckpt_step is not None and options.saves_where_it_loads and not restarted:
            broadcast_result(self._world, lambda: go_back(Path(folder), loaded.iteration))
        # Loaded as it is: a run that has nothing left to do does not write it again.
        saved = (restarted or options.saves_where_it_loads) and not loaded.remarks
        return StartingPoint(
            loaded.iteration,
            loaded.consumed_samples,
            _warnings((*loaded.remarks, *changed_recipe(loaded.extra, recipe(self._config)))),
            loaded.averaged,
            Best.read(loaded.extra.get("best")) if options.keep_best else None,
            saved,
        )

    def _take_weights(self, folder: str) -> StartingPoint:
        """Takes only the weights, of a model whose tensors fit; a last layer of another shape stays as initialised."""
        head, model = self._model.model.layers[-1].name, self._config.model.name
        shapes = {entry.name: entry.shard.global_shape for entry in self._model.described}
        of_head = {name for name in shapes if name.startswith(f"{head}.")}
        time_constants = set(chain(*gather(self._world, self._time_constants())))
        other_head, initial = False, set[str]()

        def leave(saved: Metadata) -> set[str]:
            nonlocal other_head, initial
            other_head = any(saved.tensors[n].shape != shapes[n] for n in of_head & saved.tensors.keys())
            initial = time_constants - saved.tensors.keys()
            return (of_head if other_head else set()) | initial

        loaded = load_checkpoint(
            folder,
            LocalState(self._model.tensors),
            step=self._options.ckpt_step,
            process_group=self._world,
            check=lambda saved: model_differences(saved, model, None),
            leave=leave,
        )
        remarks = [*loaded.remarks, *changed_samples(loaded.extra, self._config)]
        if other_head:
            remarks.append(f"{head} is of another shape in the checkpoint: it stays as it is initialised")
        if initial:
            more = f" and {len(initial) - 1} more" * (len(initial) > 1)
            remarks.append(
                f"the checkpoint holds no time constants of neurons ({min(initial)}{more}): they start from --tau "
                f"{self._config.neuron.tau}"
            )
        return StartingPoint(notice=_warnings(remarks))

    def _time_constants(self) -> list[str]:
        """Names of the parameters by which this rank's neurons learn their time constants."""
        neurons = self._model.neurons()
        return [owner_name(n, "w", path) for path, n in neurons if isinstance(n, ParallelNeuron) and n.w is not None]

    def _problems(self, saved: Metadata) -> Iterator[str]:
        """Yields differences of the model; unless it only evaluates, of the data and its order, to which the
        checkpoint's position refers."""
        yield from model_differences(saved, self._config.model.name, identity(self._config))
        if self._evaluates_only:
            return
        if not saved.extra.keys() & self._place.keys():
            yield "it keeps no place in the data, as a megasnn.Engine has none: --finetune takes its weights only"
            return
        for name, value in self._place.items():
            if saved.extra.get(name) != value:
                before = in_message(saved.extra.get(name))
                yield (
                    f"{name}: {before} when it was saved, {value} now: in other data or another order "
                    "its place in the data means nothing (--finetune takes its weights only)"
                )


def _warnings(remarks: Iterable[str]) -> str:
    return "\n".join(f"WARNING: {remark}" for remark in remarks)
