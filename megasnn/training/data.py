"""Samples that a run trains and evaluates on."""

from __future__ import annotations

from functools import partial

from megasnn.common.checks import error_context
from megasnn.config import PretrainConfig
from megasnn.config.values import CLASS_NAMES, samples
from megasnn.data import BatchLoader, Datasets, open_datasets
from megasnn.data.arrays import ArrayFile, ArrayFormat
from megasnn.data.loader import epoch_samples, order_identity
from megasnn.data.preprocess.sample import shards_of_sample
from megasnn.engine import Engine
from megasnn.models.build import task_of
from megasnn.models.model import Model
from megasnn.parallel.agreement import broadcast_result, sum_over_ranks
from megasnn.parallel_state import ParallelState


def arrays_of(model: Model) -> ArrayFormat | None:
    """Files of a model's samples in shards; None where they are images, or event frames, and classes. Raises ValueError
    for an array that is in no file."""
    if not {"inputs", "target"} & {*model.own_task()}:
        return None
    task = task_of(model)
    target = task.target if isinstance(task.target, str) else "" if task.classes else "target"
    arrays = {**task.inputs, **({target: task.target_spec} if target else {})}
    for name, each in arrays.items():
        is_image = name in task.inputs and len(each.shape) == 3 and each.dtype == "float" and not each.over_time
        if not each.file and not is_image:
            raise ValueError(
                f'{model.name} says no file for {name!r} in shards: ArraySpec(..., file="npy"); or train it with a '
                "megasnn.Engine, on batches of your own"
            )
    files = tuple(
        ArrayFile(name, each.file, each.shape, each.dtype, each.below, each.void) for name, each in arrays.items()
    )
    return ArrayFormat(files, tuple(task.inputs), target)


class RunData:
    """The data of a run, and how long the run is by it.

    Collective.

    Raises:
        ValueError: a replica would have no micro-batch of some batch, or a rank no sample of one that it shares.
    Attributes:
        datasets: for training and for evaluation.
        length: of the whole training.
        data_position: what a place in the data refers to, which a checkpoint keeps: the same data, made into the same
            frames, in the same order.
    """

    @error_context("while opening the data")
    def __init__(self, config: PretrainConfig, state: ParallelState) -> None:
        self._config = config
        self._loaders: dict[bool, BatchLoader] = {}
        data, training, model = config.data, config.training, config.model
        shape, decide = model.input_shape, partial(broadcast_result, state.world.handle)
        arrays = arrays_of(model)
        self._classes = model.num_classes if arrays is None or not arrays.target else 0
        self.datasets: Datasets = open_datasets(
            data, shape, self._classes, shards_of_sample, decide, training.evaluate_only, arrays
        )
        batch, last_batch = training.global_batch_size, data.last_batch
        self.length = training.length(epoch_samples(len(self.datasets.train), batch, last_batch))
        self.data_position: dict[str, object] = {
            "dataset": order_identity(self.datasets.train, batch, last_batch),
            **{"seed": training.seed, "shuffle": data.shuffle, "last_batch": last_batch},
            "frames": {"split_by": data.split_by},
            CLASS_NAMES: [*self.datasets.classes],
        }

    @property
    def notices(self) -> list[str]:
        """For the user: shards are used twice, the model has more classes than the data, or nothing is evaluated."""
        return [*self.datasets.warnings, self._notice()]

    def _notice(self) -> str:
        if self._config.logging.eval_iters != 0 and not self.evaluates:
            return "without --valid-data-path nothing is evaluated"
        found, classes = int(self.datasets.train.labels.max()) + 1, self._classes
        if found >= classes:
            return ""
        return f"WARNING: the last class in --data-path is {found - 1}, and the model has {classes} (--num-classes)"

    @property
    def evaluates(self) -> bool:
        """True where there are samples to evaluate on."""
        return self.datasets.valid is not None

    @property
    def samples_to_evaluate(self) -> int:
        """In a whole evaluation."""
        found, limit = len(self.datasets.valid or ()), self._config.logging.eval_iters
        return found if limit is None else min(found, limit * self._config.training.global_batch_size)

    @property
    def evaluation(self) -> dict[str, object]:
        """Identity of an evaluation: the validation set, the number of its samples, and how they are made."""
        found = "" if self.datasets.valid is None else self.datasets.valid.fingerprint()
        return {"dataset": found, "samples": self.samples_to_evaluate, **samples(self._config)}

    def skipped_over_replicas(self, engine: Engine, samples: int, training: bool) -> int:
        """Broken samples that were replaced, of all replicas, from those that this rank has counted; 0 where that is
        not allowed. Collective."""
        if not self._config.data.skip_broken_samples:
            return 0
        # All ranks of a replica that read images come to the same choice.
        share = engine.batches.trained_share if training else engine.batches.evaluated_share
        shared = share.cp_size == 1 and engine.state.cp.rank
        counts = engine.takes_images and engine.state.tp.rank == 0 and not shared
        return int(sum_over_ranks(engine.state.world.handle, [float(samples * counts)])[0])

    def loader(self, engine: Engine, training: bool = True) -> BatchLoader:
        """Reads this rank's shares of the global batches; the same one for all evaluations, which share its workers."""
        if training not in self._loaders:
            share = engine.batches.trained_share if training else engine.batches.evaluated_share
            dataset = self.datasets.train if training else self.datasets.valid
            assert dataset is not None
            config, pins = self._config, engine.state.device.type == "cuda"
            self._loaders[training] = BatchLoader(dataset, share, config.data, config.training.seed, training, pins)
        return self._loaders[training]
