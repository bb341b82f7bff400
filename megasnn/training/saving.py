"""Where a run starts from and what it saves: the run's side of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megasnn import checkpoint
from megasnn.checkpoint.compare import config_differences
from megasnn.checkpoint.description import BESIDE
from megasnn.comm.agreement import all_do
from megasnn.config import PretrainConfig
from megasnn.config.identity import Identity, changed_recipe, identity, recipe
from megasnn.engine import Engine
from megasnn.files.described import in_message
from megasnn.files.problems import raise_problems
from megasnn.layers import BuildContext, KeyedLayer
from megasnn.models.description import ModelDescription
from megasnn.models.table import saved_model_name
from megasnn.optim import state_kinds
from megasnn.parallel_state import ParallelState
from megasnn.process.fault import is_ending, placed
from megasnn.process.job import JobFolder
from megasnn.random import GENERATOR
from megasnn.sharding import ShardedTensor


@dataclass(frozen=True)
class StartingPoint:
    """Where a run starts.

    Attributes:
        iteration, consumed_samples: done before; 0 at the beginning.
        notice: what the user should know about it; "" where it is as asked for.
        averaged: whether the average of the weights was loaded.
    """

    iteration: int = 0
    consumed_samples: int = 0
    notice: str = ""
    averaged: bool = False


@dataclass(frozen=True)
class _Best:
    """The best evaluation so far, as a checkpoint keeps it."""

    iteration: int
    accuracy_top1: float

    @classmethod
    def read(cls, saved: object) -> _Best | None:
        """None where nothing is saved, or something else."""
        match saved:
            case {"iteration": int(iteration), "accuracy_top1": float(accuracy)}:
                return cls(iteration, accuracy)
        return None


@placed("while looking at the checkpoint of --load")
def refuse_other_model(config: PretrainConfig, state: ParallelState) -> None:
    """Raises CheckpointError on every rank when --load names a checkpoint of another model, --finetune or not, or one
    of other dimensions or another neuron that is to be continued.

    Collective. It comes before anything is built; whatever else is wrong with a checkpoint is told when it is loaded.
    """
    options, model, mine = config.checkpoint, config.model.name, identity(config)

    def refuse() -> Identity:
        metadata = checkpoint.first_legible(Path(str(options.load)), options.ckpt_step)
        if metadata is None:
            return mine
        saved = saved_model_name(metadata)
        if saved not in (None, model):
            raise checkpoint.CheckpointError(f"--load {options.load}: {checkpoint.other_model(saved, model)}")
        if metadata.config is not None and not options.finetune:
            title = f"the checkpoint of --load {options.load} does not fit this run:"
            raise_problems(title, config_differences(metadata.config, mine))
        return mine

    if options.load:  # each rank has taken from it what no flag gives
        of_first = checkpoint.first_decides(state.world.handle, refuse)

        def compare() -> None:
            raise_problems(f"rank {state.rank}", config_differences(of_first, mine))

        all_do(state.world.handle, compare, f"not all ranks see the same checkpoint in --load {options.load}:")


class Saves:
    """Checkpoints of one run.

    Args:
        dataset: fingerprint of the training data.
    """

    def __init__(
        self,
        config: PretrainConfig,
        engine: Engine,
        state: ParallelState,
        dataset: object,
    ) -> None:
        self._options, self._engine, self._state = config.checkpoint, engine, state
        self._model = config.model
        self._optimizer, self._average = engine.optimizer, engine.average
        self._tensors = engine.saved_tensors()
        self._state_kinds = state_kinds(config.optimizer)
        if refused := [entry.name for entry in engine.distributed.tensors if entry.name.startswith(BESIDE)]:
            raise ValueError(f"{refused[0]}: names that begin with {' or '.join(BESIDE)} are not for layers")
        self._identity = identity(config)
        self._data_identity = _data_identity(config, dataset)
        self._recipe = recipe(config)
        self._draws = config.data.draws or _draws(engine.distributed.model)
        self._job: JobFolder | None = None
        self._saver: checkpoint.Saver | None = None
        self._evaluates_only = config.training.evaluate_only
        self._best: _Best | None = None
        self._best_before: _Best | None = None
        self._saves_best = False
        self.report: Callable[[str], None] = print
        self.complete: Callable[[int, Path], None] = lambda iteration, path: None

    def load(self) -> StartingPoint:
        """Claims the folder to save in, and fills the engine with what the run starts from. Collective.

        That is where a restarted job stood, or a checkpoint, or SpikingJelly's weights; otherwise the keyed initial
        values stay.
        """
        options = self._options
        resumes, notice = self._claim() if options.save else (False, "")
        with placed("while loading"):
            if resumes:
                begin = self._continue(str(options.save), restarted=True)
            elif options.load_spikingjelly:
                theirs = checkpoint.read_state_dict(options.load_spikingjelly)
                weights = self._model.from_spikingjelly(theirs)
                checkpoint.load_globals_into(self._engine.distributed.tensors, weights, self._state.world.handle)
                begin = StartingPoint()
            elif options.load:
                begin = self._take_weights(options.load) if options.finetune else self._continue(options.load)
            else:
                begin = StartingPoint()
        self._engine.distributed.refresh_copies()
        if self._average is not None and not begin.averaged:
            self._average.restart()
        return replace(begin, notice="\n".join(filter(None, (notice, begin.notice))))

    @placed("while claiming the folder of --save")
    def _claim(self) -> tuple[bool, str]:
        """Whether this is a job that goes on after a restart, and what the user should know."""
        options, world, folder = self._options, self._state.world.handle, Path(str(self._options.save))
        continues = options.saves_where_it_loads and not options.finetune

        def claim() -> tuple[bool, str, int]:
            self._job = JobFolder(folder)
            there = checkpoint.list_checkpoints(folder)
            other = there and not self._job.resumes and not continues
            mixed = (
                f"WARNING: {folder} holds checkpoints up to iteration {there[-1]} that this run does not continue "
                f"(--load {folder} would); its own are saved among them"
                if other
                else ""
            )
            others = 0 if continues else self._job.found
            return self._job.resumes, "\n".join(filter(None, (self._job.notice, mixed))), others

        resumes, notice, others = checkpoint.first_decides(world, claim)
        self._saver = checkpoint.Saver(
            folder,
            process_group=world,
            background=options.async_save,
            retention=checkpoint.Retention(options.keep_last, options.keep_every, others),
            report=self._tell,
            complete=lambda iteration, path: self.complete(iteration, path),
        )
        return resumes, notice

    def _continue(self, folder: str, restarted: bool = False) -> StartingPoint:
        """Goes on from the checkpoint that was asked for; a restarted job from its latest, whatever it was told."""
        options = self._options
        leaves_optimizer = self._evaluates_only or (options.no_load_optim and not restarted)
        try:
            loaded = checkpoint.load_checkpoint(
                folder,
                tensors=self._engine.distributed.tensors,
                optimizer=None if leaves_optimizer else self._optimizer,
                optimizer_state=self._state_kinds,
                model=self._model.name,
                config=self._identity,
                step=None if restarted else options.ckpt_step,
                process_group=self._state.world.handle,
                refuse=self._other_data if not self._evaluates_only else lambda saved: (),
                averages=None if self._average is None else self._average.tensors,
            )
        except checkpoint.NoCheckpointError:
            if not self._may_begin_anew():
                raise
            return StartingPoint(notice=f"no checkpoint in {folder}: starting from the beginning")
        if self._evaluates_only:
            if self._average is not None and not loaded.averaged:
                raise checkpoint.CheckpointError(
                    f"{loaded.path} holds no average of the weights to evaluate: leave --ema-decay out"
                )
            return StartingPoint(loaded.iteration, 0, _warnings(loaded.remarks), loaded.averaged)
        self._best = _Best.read(loaded.extra.get("best")) if options.keep_best else None
        if (
            self._saver is not None
            and (restarted or options.saves_where_it_loads)
            and not (loaded.remarks or options.no_load_optim)
        ):
            self._saver.saved = loaded.iteration  # as it is; a run that has nothing left to do does not write it again
        remarks = (*loaded.remarks, *self._changes(loaded.extra))
        return StartingPoint(loaded.iteration, loaded.consumed_samples, _warnings(remarks), loaded.averaged)

    def _changes(self, saved: Mapping[str, object]) -> list[str]:
        """Flags that differ from those of the run that saved: that is allowed, and the user is told."""
        if not isinstance(saved.get("recipe"), Mapping):  # weights from elsewhere
            return []
        remarks = changed_recipe(saved, self._recipe)
        if self._draws and saved.get("generator") != GENERATOR:
            remarks.append(
                f"the checkpoint was saved by a program that drew from other random numbers than {GENERATOR}: what "
                "dropout and augmentation draw differs from here on"
            )
        return remarks

    def _take_weights(self, folder: str) -> StartingPoint:
        """Only the weights, of a model whose tensors fit; with --reset-head without the last layer."""
        head = self._engine.distributed.model.layers[-1].name
        loaded = checkpoint.load_checkpoint(
            folder,
            tensors=self._engine.distributed.tensors,
            model=self._model.name,
            step=self._options.ckpt_step,
            process_group=self._state.world.handle,
            leave=head if self._options.reset_head else None,
        )
        return StartingPoint(notice=_warnings(loaded.remarks))

    def _may_begin_anew(self) -> bool:
        """Whether a missing checkpoint is allowed: a job that saves where it loads finds none the first time."""
        options = self._options
        explicit = options.exit_on_missing_checkpoint or options.ckpt_step is not None
        return not explicit and options.saves_where_it_loads

    def _other_data(self, saved: checkpoint.Metadata) -> Iterator[str]:
        """Where the data or its order is not what the checkpoint's place in it refers to."""
        if not saved.extra.keys() & self._data_identity.keys():
            yield "it keeps no place in the data, as a megasnn.Engine has none: --finetune takes its weights only"
            return
        for name, value in self._data_identity.items():
            if saved.extra.get(name) != value:
                before = in_message(saved.extra.get(name))
                yield (
                    f"{name}: {before} when it was saved, {value} now: in other data or another order "
                    "its place in the data means nothing (--finetune takes its weights only)"
                )

    def _tell(self, text: str) -> None:
        """What becomes of a save; that one fails because another rank has ended was told as the reason to end."""
        if not is_ending():
            self.report(text)

    def entries(self) -> list[ShardedTensor]:
        """All tensors of this rank that a checkpoint holds: parameters, buffers, and the optimizer's state so far."""
        return checkpoint.with_optimizer(self._tensors, self._optimizer)

    def prepare(self) -> None:
        """After the first step, when the optimizer has its state: memory for saves in the background."""
        if self._saver is not None:
            self._saver.prepare(self._tensors, self._optimizer)

    def save(self, iteration: int, consumed_samples: int) -> None:
        """Saves unless this iteration is saved already, or tells why it cannot be. Collective."""
        if self._saver is None:
            return
        self._settle_best()
        extra: dict[str, object] = {**self._data_identity, "recipe": self._recipe, "generator": GENERATOR}
        if self._best is not None:
            extra["best"] = asdict(self._best)
        progress = checkpoint.Progress(
            iteration, consumed_samples, extra, self._identity, self._engine.layout(), self._model.name,
            self.at_best(iteration),
        )  # fmt: skip
        self._saves_best = progress.best
        self._saver.save(progress, self._tensors, self._optimizer)

    def found(self, iteration: int, accuracy: float) -> None:
        """An evaluation of this iteration found this share of right answers, the same on every rank."""
        self._settle_best()
        if self._options.keep_best and (self._best is None or accuracy > self._best.accuracy_top1):
            self._best_before, self._best = self._best, _Best(iteration, accuracy)

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

    def settle(self) -> None:
        """Before tensors are changed otherwise than by the optimizer: what is being saved is copied then."""
        if self._saver is not None:
            self._saver.settle()

    def finish(self) -> bool:
        """Waits for what is being saved; False when the save that was asked for last has failed. Collective."""
        if self._saver is None:
            return True
        self._saver.finish()
        return not self._saver.failed

    def close(self) -> None:
        if self._saver is not None:
            self._saver.close()
        if self._job is not None:
            self._job.release()


def _warnings(remarks: Iterable[str]) -> str:
    return "\n".join(f"WARNING: {remark}" for remark in remarks)


def _data_identity(config: PretrainConfig, dataset: object) -> dict[str, object]:
    """What a place in the data refers to: the same data, made into the same frames, in the same order."""
    data = config.data
    frames = {"split_by": data.split_by, "frame_duration": data.frame_duration, "normalize": data.normalize_frames}
    order = {"seed": config.training.seed, "shuffle": data.shuffle, "last_batch": data.last_batch}
    return {"dataset": dataset, **order, "frames": frames}


def _draws(model: ModelDescription) -> bool:
    """Whether any layer of the model, on whatever stage, draws random numbers in training."""
    modules = (module for layer in model.build(BuildContext()) for module in layer.modules())
    return any(isinstance(module, KeyedLayer) and module.draws for module in modules)
