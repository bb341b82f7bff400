"""Loading a checkpoint of any layout into this rank's tensors; only the boxes that the rank needs are read.

A checkpoint that does not fit or is damaged is refused on all ranks, with the same words, before anything of the model
or the optimizer has changed. In place of a damaged one the newest that is intact is taken, unless one was asked for by
its iteration.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from operator import or_
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.checkpoint.folder import resolve
from megasnn.checkpoint.format import (
    AVERAGE,
    AVERAGED_STEPS,
    BESIDE,
    OPTIMIZER,
    Metadata,
    SavedTensor,
    config_differences,
    read_metadata,
)
from megasnn.checkpoint.optimizer_state import LocalState, OptimizerStates, allocate, describe_states, state_names
from megasnn.checkpoint.save import PathLike, kind_of
from megasnn.checkpoint.tensor_io import dtype_name, read_boxes, read_full, require_intact
from megasnn.common.files import CheckpointError, DamagedError, raise_problems
from megasnn.config.training import PRECISIONS
from megasnn.parallel.agreement import broadcast_result, gather, run_on_all_ranks
from megasnn.parallel.sharding import ShardedTensor

_T = TypeVar("_T")


@dataclass(frozen=True)
class LoadedState:
    """Progress of the loaded run: completed iterations, samples seen, and `extra` as it was saved.

    Attributes:
        path: the checkpoint that was loaded.
        remarks: why it is not the one that was to be expected; the user must see them.
        averaged_steps: steps that the averages have followed which were loaded; None where none were.
    """

    iteration: int
    consumed_samples: int
    extra: dict[str, Any]
    path: Path
    remarks: tuple[str, ...] = ()
    averaged_steps: int | None = None


def load_checkpoint(
    folder: PathLike,
    state: LocalState,
    *,
    step: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    check: Callable[[Metadata], Iterable[str]] = lambda metadata: (),
    leave: Callable[[Metadata], Collection[str]] = lambda metadata: (),
    average: bool = False,
) -> LoadedState:
    """Loads the checkpoint of iteration `step`, or the latest that is intact, into this rank's tensors and optimizer.

    It may come from any layout. The optimizer's state is replaced; its hyperparameters are not touched.
    Collective over `process_group` (the group of all ranks; None for a process on its own).

    Args:
        state: without an optimizer or averages, those of the checkpoint are left aside (--finetune);
            averages are loaded where the checkpoint has them.
        check: problems that the caller sees with a checkpoint, like `model_differences`.
        leave: tensors that stay as they are, whatever the checkpoint has of their names; the same on every rank.
        average: the average of the weights is loaded in their place, where there is one; without an optimizer.

    Raises:
        NoCheckpointError: on every rank, when there is no checkpoint at all.
        DamagedError: on every rank, when files of the checkpoint of this step, or of all, are missing, cut or altered.
        CheckpointError: on every rank, when this step does not exist, `check` finds something, tensors do not fit, or
            the optimizer is of another kind. Nothing has changed then.
    """

    def load(path: Path) -> LoadedState:
        metadata = broadcast_result(process_group, lambda: read_metadata(path))
        title = f"the checkpoint {path} does not fit this run:"
        left = leave(metadata)
        has_average = any(name.startswith(AVERAGE) for name in metadata.tensors)
        source = of_average(metadata.tensors) if average and has_average else metadata.tensors
        saved = {name: described for name, described in source.items() if name not in left}
        averaged = state.averages is not None and has_average

        def prepare() -> tuple[list[ShardedTensor], OptimizerStates]:
            if wrong := [*check(metadata), *_optimizer_difference(metadata, kind_of(state.optimizer))]:
                raise CheckpointError(*wrong)
            states = allocate(state.stepped, state.optimizer, saved) if state.optimizer is not None else {}
            averages = (state.averages or ()) if averaged else ()
            return [*state.tensors, *averages, *describe_states(state.stepped, states)], states

        entries, states = run_on_all_ranks(process_group, prepare, title)
        wanted = [entry for entry in entries if entry.name not in left]
        frozen = {entry.name for entry in state.tensors if entry.is_parameter and not entry.tensor.requires_grad}
        used = {entry.name for entry in wanted}
        used |= {f"{OPTIMIZER}{kind}.{name}" for kind, name in state_names(saved) if name in frozen}  # left aside
        aside = (OPTIMIZER,) * (state.optimizer is None) + (AVERAGE,) * (state.averages is None)
        _require_fit(saved, wanted, used, aside, process_group, title)
        share = (0, 1) if process_group is None else (process_group.rank(), process_group.size())
        run_on_all_ranks(process_group, lambda: require_intact(path, metadata, *share), f"cannot load {path}:")
        run_on_all_ranks(process_group, lambda: read_boxes(path, saved, wanted), f"cannot load {path}:")
        if state.optimizer is not None:
            state.optimizer.state.update(states)
        steps = averaged_steps(metadata) if averaged or (average and has_average) else None
        return LoadedState(metadata.iteration, metadata.consumed_samples, metadata.extra, path, (), steps)

    loaded, remarks = _first_intact(folder, step, process_group, load)
    return replace(loaded, remarks=remarks)


def of_average(tensors: Mapping[str, _T]) -> dict[str, _T]:
    """The averages of the weights, by the names of the weights."""
    return {name.removeprefix(AVERAGE): value for name, value in tensors.items() if name.startswith(AVERAGE)}


def averaged_steps(metadata: Metadata) -> int:
    """Steps that the average in a checkpoint has followed; in old ones, those of the run."""
    steps = metadata.extra.get(AVERAGED_STEPS)
    return steps if isinstance(steps, int) and steps >= 0 else metadata.iteration


def _first_intact(
    folder: PathLike, step: int | None, process_group: dist.ProcessGroup | None, load: Callable[[Path], _T]
) -> tuple[_T, tuple[str, ...]]:
    """Result of `load`, which raises DamagedError on all ranks or on none, for the first checkpoint that is intact; and
    remarks for the user. Raises DamagedError when none is, and as `resolve`."""
    remarks = list[str]()
    for path in broadcast_result(process_group, lambda: resolve(Path(folder), step)):
        try:
            loaded = load(path)
        except DamagedError as error:
            if step is not None:
                raise
            remarks.append(f"{path} is damaged and was passed over: {error}")
        else:
            return loaded, tuple(remarks)
    raise DamagedError(f"{folder} holds no checkpoint that is intact:", *remarks)


def _require_fit(
    saved: Mapping[str, SavedTensor],
    entries: Iterable[ShardedTensor],
    used: Collection[str],
    aside: tuple[str, ...],
    process_group: dist.ProcessGroup | None,
    title: str,
    rounds: bool = False,
) -> None:
    """Raises CheckpointError on every rank where a tensor is missing, of another shape or of a type that would lose
    digits (unless it `rounds`), or where no rank has taken one that is saved and not left `aside` by its beginning."""
    problems = []
    for entry in entries:
        described = saved.get(entry.name)
        if described is None:
            problems.append(f"{entry.name}: missing")
        elif described.shape != entry.shard.global_shape:
            problems.append(
                f"{entry.name}: saved with shape {list(described.shape)}, now {list(entry.shard.global_shape)}"
            )
        elif not _keeps_values(getattr(torch, described.dtype), entry.tensor.dtype, rounds):
            able = [name for name, precision in PRECISIONS.items() if precision.weights == described.dtype]
            advice = f"; load it with --precision {' or '.join(able)}" if able else ""
            problems.append(f"{entry.name}: saved as {described.dtype}, {entry.tensor.dtype} cannot hold it{advice}")
    mine = sum(1 << bit for bit, name in enumerate(saved) if name in used)  # all names of thousands of ranks are long
    reports = gather(process_group, (mine, problems))
    anywhere = reduce(or_, (bits for bits, _ in reports))
    unused = [
        f"{name}: saved, but nothing here takes it"
        for bit, name in enumerate(saved)
        if not anywhere >> bit & 1 and not name.startswith(aside)
    ]
    raise_problems(title, [*chain(*(found for _, found in reports)), *unused])


def _keeps_values(source: torch.dtype, target: torch.dtype, rounds: bool) -> bool:
    """True when a conversion from one type to the other is exact, or may round: no numbers of floating point become
    integers but counts."""
    if rounds:
        return source.is_floating_point == target.is_floating_point or target == torch.int64
    return torch.promote_types(source, target) == target


# --- another model


def model_differences(metadata: Metadata, model: str | None, config: Mapping[str, Any] | None) -> Iterator[str]:
    """Differences between the saved model and that of this run, in words.

    Args:
        model: its name; None accepts any.
        config: what defines it; None accepts any model whose tensors fit (--finetune).
    """
    if model is not None and metadata.model not in (None, model):
        yield f"it is a checkpoint of the model {metadata.model}, and this run trains {model}"
    elif config is not None and metadata.config is None:
        yield "it holds weights without a model configuration; load it with --finetune"
    elif config is not None and metadata.config is not None:
        found = list(config_differences(metadata.config, config))
        yield from found + [
            "leave the flags out to continue; for a last layer of another shape take --finetune"
        ] * bool(found)


def _optimizer_difference(metadata: Metadata, optimizer: str | None) -> Iterator[str]:
    """Reason why this optimizer, by its class name, cannot take the saved state; nothing without an optimizer."""
    if optimizer is None or metadata.optimizer == optimizer:
        return
    if metadata.optimizer is None:
        yield "it holds no optimizer state; load it with --finetune"
    else:
        yield f"its optimizer state is of {metadata.optimizer}, this run uses {optimizer}; --finetune takes its weights"


# --- full tensors


def load_global_tensors(
    folder: PathLike, step: int | None = None, *, with_optimizer: bool = False
) -> dict[str, Tensor]:
    """Full tensors of a checkpoint by global name, on the CPU, in one process.

    Warns when they are not of the latest, because that one is damaged. Raises CheckpointError as `load_checkpoint`.

    Args:
        with_optimizer: the optimizer's state and the average of the weights too.
    """

    def load(path: Path) -> dict[str, Tensor]:
        metadata = read_metadata(path)
        return read_full(path, metadata, (n for n in metadata.tensors if with_optimizer or not n.startswith(BESIDE)))

    tensors, remarks = _first_intact(folder, step, None, load)
    for remark in remarks:
        warnings.warn(remark, stacklevel=2)
    return tensors


def load_globals_into(
    tensors: Iterable[ShardedTensor], values: Mapping[str, Tensor], process_group: dist.ProcessGroup | None = None
) -> None:
    """Copies this rank's part of every global tensor into the model, converted to the model's dtype.

    Collective over `process_group`, the group of all ranks (None for a process on its own): together they
    must take exactly these tensors.

    Raises CheckpointError on every rank, before anything is changed, where one is missing or of another shape.
    """
    entries = list(tensors)
    global_tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    shapes = {name: SavedTensor(tuple(value.shape), dtype_name(value), ()) for name, value in global_tensors.items()}
    used = {entry.name for entry in entries}
    _require_fit(shapes, entries, used, (), process_group, "these weights are not this model's:", rounds=True)
    with torch.no_grad():
        for entry in entries:
            for piece in entry.shard.pieces():
                piece.of_local(entry.tensor).copy_(piece.of_global(values[entry.name]))
