"""Where a run starts from: a checkpoint, weights alone, or the initial values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megasnn import checkpoint
from megasnn.checkpoint.job import FolderLock
from megasnn.checkpoint.load import config_differences, model_differences
from megasnn.checkpoint.state_dict import read_state_dict
from megasnn.config import PretrainConfig
from megasnn.config.identity import Identity, changed_recipe, changed_samples, identity, recipe
from megasnn.engine import Engine
from megasnn.engine.faults import placed
from megasnn.files import in_message, raise_problems
from megasnn.layers import BuildContext, KeyedLayer, ParallelNeuron
from megasnn.models.description import ModelDescription
from megasnn.models.table import saved_model_name
from megasnn.parallel.agreement import run_on_all_ranks
from megasnn.parallel.sharding import owner_name
from megasnn.parallel_state import ParallelState
from megasnn.random import GENERATOR
from megasnn.training.hosts import require_shared


@placed("while looking at the checkpoint of --load")
def refuse_other_model(config: PretrainConfig, state: ParallelState) -> None:
    """Raises CheckpointError on every rank when --load names no checkpoint, or one of another model, --finetune or
    not, or one of other dimensions or another neuron that is to be continued.

    Collective. It comes before anything is built; whatever else is wrong with a checkpoint is told when it is loaded.
    """
    options, model, mine = config.checkpoint, config.model.name, identity(config)

    def refuse() -> Identity:
        has_saved = options.save is not None and checkpoint.list_checkpoints(Path(options.save))
        if not options.may_begin_anew and not has_saved:  # with checkpoints of its own a restarted job goes on there
            checkpoint.resolve(Path(str(options.load)), options.ckpt_step)
        metadata = checkpoint.first_legible(Path(str(options.load)), options.ckpt_step)
        if metadata is None:
            return mine
        saved = saved_model_name(metadata)
        if saved not in (None, model):
            raise checkpoint.CheckpointError(f"--load {options.load}: {checkpoint.other_model(saved, model)}")
        if metadata.config is not None and not options.finetune:
            title = (
                f"the checkpoint of --load {options.load} does not fit this run; --finetune takes its weights alone:"
            )
            raise_problems(title, config_differences(metadata.config, mine))
        return mine

    if options.load and not options.loads_weights:  # each rank has taken from it what no flag gives
        of_first = checkpoint.broadcast_result(state.world.handle, refuse)

        def compare() -> None:
            raise_problems(f"rank {state.rank}", config_differences(of_first, mine))

        run_on_all_ranks(
            state.world.handle, compare, f"not all ranks see the same checkpoint in --load {options.load}:"
        )


@dataclass(frozen=True)
class Claim:
    """The folder of --save, which no other run saves in meanwhile.

    Attributes:
        folder: of the checkpoints.
        job: holds the lock; only on the first rank.
        resumes: this is a job that goes on after a restart.
        others: the last serial of checkpoints there that this run does not continue, and does not remove.
        notice: what the user should know; "" when nothing.
    """

    folder: Path
    job: FolderLock | None
    resumes: bool
    others: int
    notice: str

    def release(self) -> None:
        """At the end of the run."""
        if self.job is not None:
            self.job.release()


@placed("while claiming the folder of --save")
def claim(config: PretrainConfig, state: ParallelState) -> Claim | None:
    """None without --save.

    Collective. Raises CheckpointError on every rank: another run saves there, nobody can, or hosts see other folders.
    """
    options = config.checkpoint
    if not options.save:
        return None
    folder, continues = Path(options.save), options.saves_where_it_loads and not options.finetune
    job: FolderLock | None = None

    def by_first() -> tuple[bool, int, str]:
        nonlocal job
        job = FolderLock(folder, is_job=True)
        there = checkpoint.list_checkpoints(folder)
        other = there and not job.resumes and not continues
        mixed = (
            f"WARNING: {folder} holds checkpoints up to iteration {there[-1]} that this run does not continue "
            f"(--load {folder} would); its own are saved among them"
            if other
            else ""
        )
        return job.resumes, 0 if continues else job.found, "\n".join(filter(None, (job.notice, mixed)))

    decided = checkpoint.broadcast_result(state.world.handle, by_first)
    claimed = Claim(folder, job, *decided)
    try:
        require_shared(folder, state)
    except checkpoint.CheckpointError:
        claimed.release()
        raise
    return claimed


@dataclass(frozen=True)
class Best:
    """The best evaluation so far, as a checkpoint keeps it."""

    iteration: int
    accuracy_top1: float

    @classmethod
    def read(cls, saved: object) -> Best | None:
        """None where nothing is saved, or something else."""
        match saved:
            case {"iteration": int(iteration), "accuracy_top1": float(accuracy)}:
                return cls(iteration, accuracy)
        return None


@dataclass(frozen=True)
class StartingPoint:
    """Where a run starts.

    Attributes:
        iteration, consumed_samples: done before; 0 at the beginning.
        notice: what the user should know about it; "" where it is as asked for.
        averaged: whether the average of the weights was loaded.
        best: the best evaluation before.
        saved: whether a checkpoint in the folder of --save is of this very state.
        owes_evaluation: whether the run before was asked to stop before it had finished an evaluation that was due.
    """

    iteration: int = 0
    consumed_samples: int = 0
    notice: str = ""
    averaged: bool = False
    best: Best | None = None
    saved: bool = False
    owes_evaluation: bool = False


class Start:
    """Loads what a run starts from.

    Args:
        place: what a place in the data refers to; see `megasnn.training.data`.
    """

    def __init__(self, config: PretrainConfig, engine: Engine, place: Mapping[str, object]) -> None:
        self._config, self._options, self._engine, self._place = config, config.checkpoint, engine, place
        self._average, self._world = engine.steps.average, engine.state.world
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
            theirs = read_state_dict(str(options.load))
            weights = self._config.model.from_spikingjelly(theirs)
            checkpoint.load_globals_into(self._engine.distributed.tensors, weights, self._world.handle)
        elif options.load:
            begin = self._take_weights(options.load) if options.finetune else self._continue(options.load)
        self._engine.steps.loaded((begin.iteration, begin.consumed_samples), begin.averaged)
        return begin

    def _continue(self, folder: str, restarted: bool = False) -> StartingPoint:
        """Goes on from the checkpoint that was asked for; a restarted job from its latest, whatever it was told."""
        options = self._options
        try:
            state = self._engine.checkpoints.state
            loaded = checkpoint.load_checkpoint(
                folder,
                replace(state, optimizer=None) if self._evaluates_only else state,
                step=None if restarted else options.ckpt_step,
                process_group=self._world.handle,
                check=self._problems,
            )
        except checkpoint.NoCheckpointError:
            if not options.may_begin_anew:
                raise
            return StartingPoint(notice=f"no checkpoint in {folder}: starting from the beginning")
        if self._evaluates_only:
            if self._average is not None and not loaded.averaged:
                raise checkpoint.CheckpointError(
                    f"{loaded.path} holds no average of the weights to evaluate: leave --ema-decay out"
                )
            remarks = *loaded.remarks, *changed_samples(loaded.extra, self._config)
            return StartingPoint(loaded.iteration, 0, _warnings(remarks), loaded.averaged)
        # What was loaded as it is: a run that has nothing left to do does not write it again.
        saved = (restarted or options.saves_where_it_loads) and not loaded.remarks
        return StartingPoint(
            loaded.iteration,
            loaded.consumed_samples,
            _warnings((*loaded.remarks, *self._changes(loaded.extra))),
            loaded.averaged,
            Best.read(loaded.extra.get("best")) if options.keep_best else None,
            saved,
            loaded.extra.get("owes_evaluation") is True,
        )

    def _changes(self, saved: Mapping[str, object]) -> list[str]:
        """Flags that differ from those of the run that saved: that is allowed, and the user is told."""
        if not isinstance(saved.get("recipe"), Mapping):  # weights from elsewhere
            return []
        remarks = changed_recipe(saved, recipe(self._config))
        draws = self._config.data.draws or _draws(self._engine.distributed.model)
        if draws and saved.get("generator") != GENERATOR:
            remarks.append(
                f"the checkpoint was saved by a program that drew from other random numbers than {GENERATOR}: what "
                "dropout and augmentation draw differs from here on"
            )
        return remarks

    def _take_weights(self, folder: str) -> StartingPoint:
        """Only the weights, of a model whose tensors fit; a last layer of another shape stays as it is initialised."""
        head = self._engine.distributed.model.layers[-1].name
        tensors, model = self._engine.distributed.tensors, self._config.model.name
        loaded = checkpoint.load_checkpoint(
            folder,
            checkpoint.LocalState(tensors),
            step=self._options.ckpt_step,
            process_group=self._world.handle,
            check=lambda saved: model_differences(saved, model, None),
            replaceable=head,
            optional=self._time_constants(),
        )
        remarks = [*loaded.remarks, *changed_samples(loaded.extra, self._config)]
        if loaded.replaced:
            remarks.append(f"{head} is of another shape in the checkpoint: it stays as it is initialised")
        if loaded.initial:
            first, count = loaded.initial[0], len(loaded.initial)
            remarks.append(
                f"the checkpoint holds no time constants of neurons ({first}{f' and {count - 1} more' * (count > 1)}): "
                f"they start from --tau {self._config.neuron.tau}"
            )
        return StartingPoint(notice=_warnings(remarks))

    def _time_constants(self) -> list[str]:
        """Names of the parameters by which this rank's neurons learn their time constants."""
        layers = [each for chunk in self._engine.distributed.chunks.values() for each in chunk.named_layers()]
        return [
            owner_name(module, "w", path)
            for name, layer in layers
            for path, module in layer.named_modules(prefix=name)
            if isinstance(module, ParallelNeuron) and module.w is not None
        ]

    def _problems(self, saved: checkpoint.Metadata) -> Iterator[str]:
        """Another model than that of this run; and unless it only evaluates, where the data or its order is not what
        the checkpoint's place in it refers to."""
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


def _draws(model: ModelDescription) -> bool:
    """Whether any layer of the model, on whatever stage, draws random numbers in training."""
    modules = (module for layer in model.build(BuildContext()) for module in layer.modules())
    return any(isinstance(module, KeyedLayer) and module.draws for module in modules)
