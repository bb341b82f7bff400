"""Loads a run's start: a checkpoint, its weights, or a weight file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from megasnn.checkpoint.fit import model_differences
from megasnn.checkpoint.folder import ChosenCheckpoint, forget_best_after, go_back
from megasnn.checkpoint.format import Metadata
from megasnn.checkpoint.load import load_chosen
from megasnn.checkpoint.lock import FolderLock
from megasnn.checkpoint.optimizer_state import LocalState
from megasnn.checkpoint.weight_file import read_weights
from megasnn.common.checks import error_context
from megasnn.common.files import in_message
from megasnn.config import PretrainConfig
from megasnn.config.values import CLASS_NAMES, TOKENIZER, changed_recipe, changed_samples, config_identity
from megasnn.data.datasets import class_difference
from megasnn.engine import Engine
from megasnn.training.data import RunData
from megasnn.training.saving import Best
from megasnn.training.start import Start


@dataclass(frozen=True)
class LoadedStart:
    """State that a run has loaded.

    Attributes:
        best: best evaluation before.
        is_saved: the --save folder has a checkpoint with this very state.
        averaged: the weights are a checkpoint's average.
    """

    notices: tuple[str, ...] = ()
    best: Best | None = None
    is_saved: bool = False
    averaged: bool = False


@error_context("while loading")
def load_start(
    config: PretrainConfig, engine: Engine, data: RunData, start: Start, lock: FolderLock | None
) -> LoadedStart:
    """Loads into the engine; without a checkpoint or weights the initial values stay. Collective.

    Raises:
        CheckpointError: on every rank, where a checkpoint is damaged or does not fit; see `load_chosen`.
    """
    options = config.checkpoint
    if start.checkpoint is None:
        if options.load and options.loads_weights:
            file = read_weights(options.load, options.ema)
            engine.load_state_dict(config.model.from_spikingjelly(file.tensors))
            return LoadedStart(file.notices)
        return LoadedStart()
    if options.finetune and not start.restarted:
        return _load_weights(config, engine, data, start.checkpoint)
    return _resume(config, engine, data, start, start.checkpoint, lock)


def _resume(
    config: PretrainConfig,
    engine: Engine,
    data: RunData,
    start: Start,
    checkpoint: ChosenCheckpoint,
    lock: FolderLock | None,
) -> LoadedStart:
    """Continues from a checkpoint, or evaluates it."""
    options = config.checkpoint
    state = engine.checkpoints.state
    evaluates_only = config.training.evaluate_only
    if evaluates_only:
        state = LocalState(state.tensors)
    loaded = load_chosen(
        checkpoint,
        state,
        process_group=engine.state.world.handle,
        check=partial(_problems, config, data.data_position),
        average=evaluates_only and options.ema,
    )
    # An evaluation alone consumes no samples, whatever the training did before.
    samples = 0 if evaluates_only else loaded.consumed_samples
    engine.trainer.after_loading((loaded.iteration, samples), loaded.averaged_steps)
    if evaluates_only:
        remarks = [*loaded.remarks, *changed_samples(loaded.extra, config)]
        return LoadedStart(_warnings(remarks), averaged=loaded.averaged_steps is not None)
    best = Best.read(loaded.extra.get("best"))
    continues_there = start.restarted or options.saves_where_it_loads
    if continues_there and engine.state.rank == 0:
        # By the first rank alone: the folder is one, and an error here ends the others as any error does.
        if checkpoint.by_step:
            go_back(checkpoint.folder, loaded.iteration)
        best_iteration = None if best is None else best.iteration
        forget_best_after(checkpoint.folder, loaded.iteration, best_iteration)
        if lock is not None:
            lock.adopt()
    remarks = [*loaded.remarks, *changed_recipe(loaded.extra, config)]
    if not options.keep_best:
        best = None
    # Accuracies over other samples, or after another preprocessing, do not compare.
    elif best is not None and best.evaluation != data.evaluation:
        changed = [name for name, value in data.evaluation.items() if best.evaluation.get(name) != value]
        remarks.append(
            f"the best checkpoint so far, of iteration {best.iteration} with {best.accuracy_top1:.2%}, was found by "
            f"another evaluation ({', '.join(changed)}): --keep-best begins anew"
        )
        best = None
    # A run that has nothing left to do does not write the loaded state again.
    return LoadedStart(_warnings(remarks), best, is_saved=continues_there and not loaded.remarks)


def _load_weights(config: PretrainConfig, engine: Engine, data: RunData, checkpoint: ChosenCheckpoint) -> LoadedStart:
    """Loads only weights, for a model whose tensors fit.

    A last layer with another shape keeps its initial values, and so does a first convolution with other input channels.
    """
    description = engine.distributed.description
    shapes = {entry.name: entry.shard.global_shape for entry in description.tensors}
    first = description.layers[0].name
    last = description.layers[-1].name
    of_last = {name for name in shapes if name.startswith(f"{last}.")}
    # A model of one layer has its classes there: the layer counts as the last.
    of_first = {name for name in shapes if name.startswith(f"{first}.")} - of_last

    def untouched(metadata: Metadata) -> set[str]:
        names = set[str]()
        for name, shape in shapes.items():
            saved = metadata.tensors.get(name)
            if saved is None or saved.shape == shape:
                continue
            if name in of_last:
                # Weight and bias together: a new weight with the old classes' bias is no layer.
                names |= of_last
            elif name in of_first and _differ_in_channels(saved.shape, shape):
                names.add(name)
        return names

    loaded = load_chosen(
        checkpoint,
        LocalState(engine.distributed.tensors),
        process_group=engine.state.world.handle,
        check=lambda metadata: model_differences(metadata, config.model.name, None),
        untouched=untouched,
        average=config.checkpoint.ema,
    )
    engine.trainer.after_loading()
    remarks = [*loaded.remarks, *changed_samples(loaded.extra, config)]
    if channels := loaded.untouched & of_first:
        names = ", ".join(sorted(channels))
        remarks.append(f"{names} has other input channels in the checkpoint and keeps its initial values")
    if loaded.untouched & of_last:
        remarks.append(f"{last} has another shape in the checkpoint and keeps its initial values")
    elif different := _class_difference(data.data_position, loaded.extra):
        remarks.append(f"{different} in the checkpoint and in the data, and {last} keeps its weights")
    if different := _tokenizer_difference(data.data_position, loaded.extra):
        remarks.append(f"{different}: the embedding keeps its weights, for other tokens")
    taken = "weights" if loaded.averaged_steps is None else "average of the weights (--no-ema: the weights)"
    return LoadedStart((f"--finetune takes the {taken} of {loaded.path}", *_warnings(remarks)))


def _differ_in_channels(before: Sequence[int], now: Sequence[int]) -> bool:
    """Whether convolution weights [out, in, ...] differ in input channels alone."""
    is_convolution = len(before) == len(now) > 2
    return is_convolution and before[0] == now[0] and before[1] != now[1] and before[2:] == now[2:]


def _problems(config: PretrainConfig, data_position: Mapping[str, object], metadata: Metadata) -> Iterator[str]:
    """Differences in model and classes; in a training also in the data and their order."""
    yield from model_differences(metadata, config.model.name, config_identity(config))
    if different := _class_difference(data_position, metadata.extra):
        yield (
            f"{different} when it was saved and in the data now: make the shards again, with --classes-of and the "
            "folder that was trained on"
        )
    if config.training.evaluate_only:
        if different := _tokenizer_difference(data_position, metadata.extra):
            yield f"{different}: prepare the text with the tokenizer of the training"
        return
    if not metadata.extra.keys() & data_position.keys():
        yield "it stores no data position, as it was saved by a megasnn.Engine: --finetune loads its weights only"
        return
    for name, value in data_position.items():
        if name != CLASS_NAMES and metadata.extra.get(name) != value:
            before = in_message(metadata.extra.get(name))
            yield (
                f"{name}: {before} when it was saved, {value} now: in other data or another order "
                "its place in the data means nothing (--finetune takes its weights only)"
            )


def _tokenizer_difference(data_position: Mapping[str, object], extra: Mapping[str, object]) -> str:
    """Tokenizers of checkpoint and data if they differ; empty if one is unknown."""
    before = extra.get(TOKENIZER)
    now = data_position.get(TOKENIZER)
    if before is None or now is None or before == now:
        return ""
    return f"tokenizer: {in_message(before)} when it was saved, {now} now"


def _class_difference(data_position: Mapping[str, object], extra: Mapping[str, object]) -> str:
    """First class number with another name in checkpoint and data; empty if a list is unknown."""
    before = extra.get(CLASS_NAMES)
    now = data_position.get(CLASS_NAMES)
    if not isinstance(before, list) or not isinstance(now, list):
        return ""
    return class_difference(before, now) or ""


def _warnings(remarks: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"WARNING: {remark}" for remark in remarks)
