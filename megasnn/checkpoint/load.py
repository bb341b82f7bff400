"""Loads a checkpoint from any layout; reads only boxes that the rank needs.

All ranks refuse a misfit or damaged one with the same words, before anything changes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.checkpoint.fit import RankFit, compare_tensors, optimizer_differences, require_fit
from megasnn.checkpoint.folder import ChosenCheckpoint, choose_checkpoint, choose_older
from megasnn.checkpoint.format import AVERAGE, AVERAGED_STEPS, OPTIMIZER, Metadata, SavedTensor, averages_of, own_names
from megasnn.checkpoint.optimizer_state import LocalState, OptimizerStates, allocate, describe_states, state_names
from megasnn.checkpoint.save import PathLike, optimizer_name
from megasnn.checkpoint.tensor_io import damaged_files, dtype_name, read_boxes, read_full
from megasnn.common.files import CheckpointError, DamagedError, raise_problems
from megasnn.parallel.agreement import broadcast_result, gather, run_and_gather, run_on_all_ranks
from megasnn.parallel.sharding import ShardedTensor

_T = TypeVar("_T")
_Wanted = tuple[list[ShardedTensor], OptimizerStates]
"""A rank's tensors to load, and its optimizer state, allocated without values."""
_Report = tuple[RankFit, list[str]]
"""A rank's fit, and damaged files among its share, for all ranks."""


@dataclass(frozen=True)
class LoadedState:
    """Progress and `extra` as saved.

    Attributes:
        remarks: for the user: newer checkpoints passed over, and why.
        averaged_steps: steps that the loaded averages have followed; None where none were loaded.
        untouched: tensors that kept their values.
    """

    iteration: int
    consumed_samples: int
    extra: dict[str, Any]
    path: Path
    remarks: tuple[str, ...] = ()
    averaged_steps: int | None = None
    untouched: frozenset[str] = frozenset()


def _nothing(metadata: Metadata) -> tuple[str, ...]:
    return ()


def load_checkpoint(
    folder: PathLike,
    state: LocalState,
    *,
    step: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    check: Callable[[Metadata], Iterable[str]] = _nothing,
    untouched: Callable[[Metadata], Collection[str]] = _nothing,
    average: bool = False,
) -> LoadedState:
    """Loads iteration `step`, or the latest intact one, from any layout.

    The first rank's folder and step count. For the other arguments see `load_chosen`.

    Raises:
        NoCheckpointError: on every rank, without any checkpoint.
        CheckpointError: on every rank, when this step does not exist; and as `load_chosen`.
    """
    chosen = broadcast_result(process_group, lambda: choose_checkpoint(Path(folder), step))
    return load_chosen(chosen, state, process_group=process_group, check=check, untouched=untouched, average=average)


def load_chosen(
    chosen: ChosenCheckpoint,
    state: LocalState,
    *,
    process_group: dist.ProcessGroup | None = None,
    check: Callable[[Metadata], Iterable[str]] = _nothing,
    untouched: Callable[[Metadata], Collection[str]] = _nothing,
    average: bool = False,
) -> LoadedState:
    """Loads a checkpoint, or the next older one if it is damaged.

    Replaces the optimizer's state, not its hyperparameters. Collective over `process_group` (all ranks; None for a
    single process).

    Args:
        chosen: the same on every rank.
        state: without an optimizer or averages, the checkpoint's are ignored (--finetune).
        check: further problems, such as `model_differences`.
        untouched: names of tensors that keep their values; the same on every rank.
        average: load the weights' average in their place, if any; without an optimizer.
    Raises:
        DamagedError: on every rank, when files are missing, cut or altered, in all older checkpoints too unless a step
            was asked for.
        CheckpointError: on every rank, with nothing changed: `check` finds something, tensors do not fit, or another
            kind of optimizer.
    """
    load = partial(_load, state=state, group=process_group, check=check, untouched=untouched, average=average)
    return _first_intact(chosen, process_group, load)


def _first_intact(
    chosen: ChosenCheckpoint, group: dist.ProcessGroup | None, load: Callable[[ChosenCheckpoint], _T]
) -> _T:
    while True:
        try:
            # `load` raises DamagedError on all ranks or on none, so all choose again together.
            return load(chosen)
        except DamagedError as error:
            chosen = broadcast_result(group, partial(choose_older, chosen, error))


def _load(
    chosen: ChosenCheckpoint,
    state: LocalState,
    group: dist.ProcessGroup | None,
    check: Callable[[Metadata], Iterable[str]],
    untouched: Callable[[Metadata], Collection[str]],
    average: bool,
) -> LoadedState:
    path = chosen.path
    metadata = chosen.metadata
    left_alone = frozenset(untouched(metadata))
    tensors: Mapping[str, SavedTensor] = metadata.tensors
    averages = averages_of(tensors)
    if not averages:
        state = replace(state, averages=None)
        average = False
    if average:
        tensors = averages
    saved = {name: described for name, described in tensors.items() if name not in left_alone}
    title = f"the checkpoint {path} does not fit this run:"
    examine = partial(_examine, chosen, saved, left_alone, state, group, check)
    # Ranks agree twice: here before anything changes, and below after all have read. A read that fails in between has
    # changed tensors alone: an older checkpoint then overwrites all of them.
    (wanted, states), reports = run_and_gather(group, examine, title)
    fits = list[RankFit]()
    damaged = list[str]()
    for fit, problems in reports:
        fits.append(fit)
        damaged += problems
    ignored = list[str]()
    if state.optimizer is None:
        ignored.append(OPTIMIZER)
    if state.averages is None:
        ignored.append(AVERAGE)
    require_fit(saved, fits, tuple(ignored), title)
    raise_problems(f"cannot load {path}:", damaged, DamagedError)
    run_on_all_ranks(group, lambda: read_boxes(path, saved, wanted), f"cannot load {path}:")
    if state.optimizer is not None:
        # Only now: a rank that failed to read has ended the call on all ranks.
        state.optimizer.state.update(states)
    steps = averaged_steps(metadata) if average or state.averages is not None else None
    return LoadedState(
        metadata.iteration, metadata.consumed_samples, metadata.extra, path, chosen.remarks, steps, left_alone
    )


def _examine(
    chosen: ChosenCheckpoint,
    saved: Mapping[str, SavedTensor],
    untouched: Collection[str],
    state: LocalState,
    group: dist.ProcessGroup | None,
    check: Callable[[Metadata], Iterable[str]],
) -> tuple[_Wanted, _Report]:
    """Compares a checkpoint with this rank's state, and reads this rank's share of the files for damage.

    Args:
        saved: the checkpoint's tensors, without `untouched`.
    Raises:
        CheckpointError: `check` finds something, or another kind of optimizer.
    """
    problems = [*check(chosen.metadata), *optimizer_differences(chosen.metadata, optimizer_name(state.optimizer))]
    if problems:
        raise CheckpointError(*problems)
    states = {} if state.optimizer is None else allocate(state.stepped, state.optimizer, saved)
    entries = [*state.tensors, *(state.averages or ()), *describe_states(state.stepped, states)]
    wanted = [entry for entry in entries if entry.name not in untouched]
    fit = compare_tensors(saved, wanted, _used_names(saved, wanted, state))
    if fit.problems:
        # Checksums of large files take minutes: a rank that sees a misfit answers at once.
        return (wanted, states), (fit, [])
    share = (0, 1) if group is None else (group.rank(), group.size())
    return (wanted, states), (fit, damaged_files(chosen.path, chosen.metadata, *share))


def _used_names(saved: Mapping[str, SavedTensor], wanted: Iterable[ShardedTensor], state: LocalState) -> set[str]:
    frozen = {entry.name for entry in state.tensors if entry.is_parameter and not entry.tensor.requires_grad}
    used = {entry.name for entry in wanted}
    for kind, name in state_names(saved):
        # Frozen parameters' optimizer state is ignored: a run may freeze layers that an earlier one trained.
        if name in frozen:
            used.add(f"{OPTIMIZER}{kind}.{name}")
    return used


def averaged_steps(metadata: Metadata) -> int:
    """Steps in the average; in old checkpoints, the run's steps."""
    steps = metadata.extra.get(AVERAGED_STEPS)
    return steps if isinstance(steps, int) and steps >= 0 else metadata.iteration


def load_global_tensors(
    folder: PathLike, step: int | None = None, *, with_optimizer: bool = False
) -> dict[str, Tensor]:
    """Full tensors by global name, on the CPU, in one process.

    Warns of damaged newer checkpoints. Raises CheckpointError as `load_checkpoint`.

    Args:
        with_optimizer: adds optimizer state and averages.
    """

    def load(chosen: ChosenCheckpoint) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        saved = chosen.metadata.tensors
        names = list(saved) if with_optimizer else own_names(saved)
        return read_full(chosen.path, chosen.metadata, names), chosen.remarks

    tensors, remarks = _first_intact(choose_checkpoint(Path(folder), step), None, load)
    for remark in remarks:
        warnings.warn(remark, stacklevel=2)
    return tensors


def load_globals_into(
    tensors: Iterable[ShardedTensor], values: Mapping[str, Tensor], process_group: dist.ProcessGroup | None = None
) -> None:
    """Copies this rank's part of every global tensor, converted to the model's dtype.

    Collective over `process_group` (all ranks; None for a single process): together the ranks take exactly `values`.

    Raises CheckpointError on every rank, before any change, if one is missing or has another shape.
    """
    entries = list(tensors)
    shapes = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            # Users' dictionaries hold other values beside.
            shapes[name] = SavedTensor(tuple(value.shape), dtype_name(value), ())
    used = {entry.name for entry in entries}
    fits = gather(process_group, compare_tensors(shapes, entries, used, rounds=True))
    require_fit(shapes, fits, (), "these weights are not this model's:")
    with torch.no_grad():
        for entry in entries:
            for piece in entry.shard.pieces():
                piece.of_local(entry.tensor).copy_(piece.of_global(values[entry.name]))
