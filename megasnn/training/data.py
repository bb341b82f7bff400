"""A run's training and validation data, and this rank's batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from megasnn.common.checks import error_context
from megasnn.config import ConfigError, PretrainConfig
from megasnn.config.checks import refusal
from megasnn.config.data import NO_DATASETS, GivenDatasets
from megasnn.config.training import Length
from megasnn.config.values import CLASS_NAMES, TOKENIZER, samples
from megasnn.data import BatchLoader, Datasets, open_datasets
from megasnn.data.arrays import ArrayFile, ArrayFormat
from megasnn.data.loader import epoch_samples, order_identity
from megasnn.data.map_dataset import MapDataset, ValueFormat, names_of_classes
from megasnn.data.preprocess.sample import shards_of_sample
from megasnn.data.samples import SampleSource
from megasnn.data.tokens.dataset import TOKENS, TokenShape, open_token_datasets
from megasnn.engine import Engine
from megasnn.models.model import Model
from megasnn.models.task import task_of
from megasnn.parallel.agreement import broadcast_result, gather, sum_over_ranks
from megasnn.parallel_state import ParallelState


def value_format(model: Model) -> ValueFormat:
    """Format of a data set in Python: the model's inputs and target."""
    task = task_of(model)
    specs = dict(task.inputs)
    target = task.target
    if not isinstance(target, str):
        target = "target"
        specs[target] = task.target_spec
    files = []
    for name, each in specs.items():
        files.append(ArrayFile(name, "", each.shape, each.dtype, each.below, each.void))
    sized_by_flags = "inputs" not in model.own_task()
    return ValueFormat(tuple(files), tuple(task.inputs), target, task.classes, sized_by_flags)


def arrays_of(model: Model) -> ArrayFormat | None:
    """Sample files in shards; None for images or event frames with a class.

    Raises:
        ValueError: an array names no file.
    """
    if not {"inputs", "target"} & {*model.own_task()}:
        return None
    task = task_of(model)
    target = ""  # a class
    if isinstance(task.target, str):
        target = task.target
    elif not task.classes:
        target = "target"
    arrays = dict(task.inputs)
    if target:
        arrays[target] = task.target_spec
    files = []
    for name, each in arrays.items():
        is_image = name in task.inputs and len(each.shape) == 3 and each.dtype == "float" and not each.over_time
        if not each.file and not is_image:
            raise ValueError(
                f'{model.name} says no file for {name!r} in shards: ArraySpec(..., file="npy"); or train it with a '
                "megasnn.Engine, on batches of your own"
            )
        files.append(ArrayFile(name, each.file, each.shape, each.dtype, each.below, each.void))
    return ArrayFormat(tuple(files), tuple(task.inputs), target)


def length_for(config: PretrainConfig, samples: int, last_batch: str, replicas: int) -> Length:
    """Length of a training on so many samples.

    Raises:
        ConfigError: with every size that does not fit them.
    """
    training = config.training
    batch = training.global_batch_size
    problems = refusal(epoch_samples, samples, batch, last_batch)
    share = samples // replicas
    if problems and training.micro_batch_size > share > 0:
        problems.append(
            f"--micro-batch-size {training.micro_batch_size} is more than a replica's share of {samples} samples: "
            f"lower it to {share} or less"
        )
    epoch = samples if problems else epoch_samples(samples, batch, last_batch)
    problems += refusal(training.length, epoch)
    if problems:
        raise ConfigError(problems)
    return training.length(epoch)


def token_inputs(model: Model) -> TokenShape | None:
    """Tokens of a language model, whose target is the next ones; None for another model."""
    spec = model.inputs.get(TOKENS)
    target = model.target
    if len(model.inputs) != 1 or spec is None or isinstance(target, str) or spec.file or spec.below is None:
        return None
    is_tokens = spec.dtype == target.dtype == "int" and len(spec.shape) == 1 and spec.shape == target.shape
    return TokenShape(spec.shape[0], spec.below) if is_tokens else None


def _require_equal(state: ParallelState, datasets: Sequence[SampleSource]) -> None:
    """Raises ValueError on every rank if ranks have other data sets. Collective."""
    # A rank with other data would train on without an error: every rank reads its own share only.
    of_ranks = gather(state.world.handle, [each.fingerprint() for each in datasets])
    for rank, theirs in enumerate(of_ranks):
        if theirs != of_ranks[0]:
            raise ValueError(
                f"give every rank the same data sets: {', '.join(of_ranks[0])} on rank 0, {', '.join(theirs)} on rank "
                f"{rank}"
            )


class RunData:
    """A run's training and validation data, and its length. Making one is collective.

    Args:
        given: data sets in Python, in place of the shards of the flags.
    Raises:
        ValueError: some batch would leave a replica without a micro-batch, or a rank without a sample to share.
    Attributes:
        data_position: sample order's identity, kept in a checkpoint beside the position: data, frames, seed.
    """

    @error_context("while opening the data")
    def __init__(self, config: PretrainConfig, state: ParallelState, given: GivenDatasets = NO_DATASETS) -> None:
        self._config = config
        self._loaders: dict[bool, BatchLoader] = {}
        data = config.data
        training = config.training
        self._classes = 0  # of labels to compare with; 0 for another target
        tokens = token_inputs(config.model)
        if given.train is not None:
            self.datasets: Datasets = self._from_python(given, state)
        elif tokens is not None:
            found = open_token_datasets(data, tokens, training.evaluate_only)
            _require_equal(state, [each for each in (found.train, found.valid) if each is not None])
            self.datasets = found
        else:
            self.datasets = self._from_shards(state)
        last_batch = data.last_batch
        if training.evaluate_only:
            # The samples are in place of those of a training, and an evaluation uses all.
            last_batch = "continue"
        self.length = length_for(config, len(self.datasets.train), last_batch, state.dp.size)
        self.data_position: dict[str, object] = {
            "dataset": order_identity(self.datasets.train, training.global_batch_size, last_batch),
            "seed": training.seed,
            "shuffle": data.shuffle,
            "last_batch": data.last_batch,
            "frames": {"split_by": data.split_by},
            CLASS_NAMES: [*self.datasets.classes],
        }
        if tokens is not None:
            self.data_position[TOKENIZER] = self.datasets.tokenizer

    def _from_shards(self, state: ParallelState) -> Datasets:
        """Shards of the flags."""
        model = self._config.model
        arrays = arrays_of(model)
        if arrays is None or not arrays.target:
            self._classes = model.num_classes
        return open_datasets(
            self._config.data,
            model.input_shape,
            self._classes,
            shards_of_sample,
            partial(broadcast_result, state.world.handle),
            self._config.training.evaluate_only,
            arrays,
        )

    def _from_python(self, given: GivenDatasets, state: ParallelState) -> Datasets:
        """Data sets in Python, after a look at some samples on the first rank.

        Raises:
            ValueError: on every rank, if samples do not fit or differ when read again, or ranks have other data sets.
        """
        format = value_format(self._config.model)
        train = MapDataset(given.train, format)
        valid = None if given.valid is None else MapDataset(given.valid, format)
        _require_equal(state, [each for each in (train, valid) if each is not None])

        def require_repeatable() -> None:
            train.require_repeatable()
            if valid is not None:
                valid.require_repeatable()

        broadcast_result(state.world.handle, require_repeatable)
        return Datasets(train, valid, names_of_classes(given.train, format.classes))

    @property
    def notices(self) -> list[str]:
        """For the user: shards used twice, classes that the data lack, no validation data."""
        return [*self.datasets.warnings, self._notice()]

    def _notice(self) -> str:
        if self._config.logging.eval_iters != 0 and not self.evaluates:
            missing = "valid_dataset" if self._config.data.is_in_python else "--valid-data-path"
            return f"without {missing} nothing is evaluated"
        labels = self.datasets.train.labels
        if labels is None:
            return ""
        found = int(labels.max()) + 1
        classes = self._classes
        if found >= classes:
            return ""
        return f"WARNING: the last class in --data-path is {found - 1}, and the model has {classes} (--num-classes)"

    @property
    def evaluates(self) -> bool:
        """Whether there is validation data."""
        return self.datasets.valid is not None

    @property
    def samples_to_evaluate(self) -> int:
        """In a whole evaluation."""
        found = len(self.datasets.valid or ())
        limit = self._config.logging.eval_iters
        return found if limit is None else min(found, limit * self._config.training.global_batch_size)

    @property
    def evaluation(self) -> dict[str, object]:
        """An evaluation's identity: validation set, sample number, and preprocessing."""
        found = "" if self.datasets.valid is None else self.datasets.valid.fingerprint()
        return {"dataset": found, "samples": self.samples_to_evaluate, **samples(self._config)}

    def skipped_over_replicas(self, engine: Engine, samples: int, training: bool) -> int:
        """Broken samples that were replaced, over all replicas. Collective.

        Args:
            samples: replaced by this rank.
        """
        if not self._config.data.skip_broken_samples:
            return 0
        # Ranks of one replica replace the same samples, so one of them counts. Ranks that share a micro-batch by
        # samples (cp_size > 1 in their layout) read different ones, and all count.
        layout = engine.batches.trained_layout if training else engine.batches.evaluated_layout
        is_copy = layout.cp_size == 1 and engine.state.cp.rank != 0
        counts = engine.takes_inputs and engine.state.tp.rank == 0 and not is_copy
        return int(sum_over_ranks(engine.state.world.handle, [float(samples * counts)])[0])

    def loader(self, engine: Engine, training: bool = True) -> BatchLoader:
        """Reads this rank's shares."""
        # All evaluations use the same loader, with its workers.
        if training not in self._loaders:
            config = self._config
            layout = engine.batches.trained_layout if training else engine.batches.evaluated_layout
            dataset = self.datasets.train if training else self.datasets.valid
            assert dataset is not None
            # Copies to a GPU wait for nothing only from pinned memory.
            pins_memory = engine.state.device.type == "cuda"
            self._loaders[training] = BatchLoader(
                dataset, layout, config.data, config.training.seed, training, pins_memory
            )
        return self._loaders[training]
