"""Loading a checkpoint of any layout into this rank's tensors; only the boxes that the rank needs are read.

What does not fit and what is damaged is refused on all ranks, with the same words, before anything of the model or the
optimizer has changed. In place of a damaged checkpoint the newest one that is intact is taken, unless one was asked for
by its iteration.
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
from torch import Tensor

from megasnn.checkpoint.compare import optimizer_difference
from megasnn.checkpoint.folder import choose, reading
from megasnn.checkpoint.format import AVERAGE, BESIDE, OPTIMIZER, Metadata, SavedTensor, read_metadata
from megasnn.checkpoint.optimizer_state import LocalState, States, allocate, describe, of_frozen
from megasnn.checkpoint.save import Group, PathLike, kind_of
from megasnn.checkpoint.tensor_io import damage, read_boxes, require_intact
from megasnn.files.problems import CheckpointError, DamagedError, raise_problems
from megasnn.parallel.agreement import broadcast_result, gather, rank_in, run_on_all_ranks, size_of
from megasnn.parallel.sharding import Shard, ShardedTensor
from megasnn.precisions import PRECISIONS

T = TypeVar("T")


@dataclass(frozen=True)
class LoadedState:
    """Where the loaded run stood: completed iterations, samples seen, and what was saved as `extra`.

    Attributes:
        path: the checkpoint that was loaded.
        remarks: why it is not the one that was to be expected; the user must see them.
        averaged: whether averages were loaded.
        initial: names of those optional tensors that it does not have, which stay as they are.
    """

    iteration: int
    consumed_samples: int
    extra: dict[str, Any]
    path: Path
    remarks: tuple[str, ...] = ()
    averaged: bool = False
    initial: tuple[str, ...] = ()


def load_checkpoint(
    folder: PathLike,
    state: LocalState,
    *,
    step: int | None = None,
    process_group: Group = None,
    check: Callable[[Metadata], Iterable[str]] = lambda metadata: (),
    leave: str | None = None,
    optional: Collection[str] = (),
) -> LoadedState:
    """Loads the checkpoint of iteration `step`, or the latest that is intact, into this rank's tensors and optimizer.

    It may come from any layout. The optimizer's state is replaced; its hyperparameters are not touched.
    Collective over `process_group` (the group of all ranks; None for a process on its own).

    Args:
        state: without an optimizer or averages, those of the checkpoint are left aside (--finetune, --no-load-optim);
            averages are loaded where the checkpoint has them.
        check: problems that the caller sees with a checkpoint; `megasnn.checkpoint.compare` has some to look for.
        leave: a layer whose tensors stay as they are, whatever the checkpoint holds of them (--reset-head).
        optional: tensors that stay as they are where the checkpoint has none of this name.

    Raises:
        NoCheckpointError: on every rank, when there is no checkpoint at all.
        DamagedError: on every rank, when files are missing, cut or altered, of the checkpoint of this step or of all
            that there are.
        CheckpointError: on every rank, when this step does not exist, `check` finds something, tensors are missing,
            unexpected, of another shape or of a precision that would be lost, or the optimizer is of another kind.
        Nothing has changed then.
    """

    def load(path: Path) -> LoadedState:
        metadata = broadcast_result(process_group, lambda: read_metadata(path))
        title = f"the checkpoint {path} does not fit this run:"
        saved = {name: told for name, told in metadata.tensors.items() if not _of_layer(name, leave)}
        averaged = state.averages is not None and any(name.startswith(AVERAGE) for name in saved)

        def prepare() -> tuple[list[ShardedTensor], States]:
            wrong = [*check(metadata), *optimizer_difference(metadata, kind_of(state.optimizer))]
            if wrong:
                raise CheckpointError(*wrong)
            stepped = [entry for entry in state.stepped if not _of_layer(entry.name, leave)]
            states = allocate(stepped, state.optimizer, saved) if state.optimizer is not None else {}
            averages = (state.averages or ()) if averaged else ()
            return [*state.tensors, *averages, *describe(stepped, states)], states

        entries, states = run_on_all_ranks(process_group, prepare, title)
        initial = tuple(entry.name for entry in entries if entry.name in optional and entry.name not in saved)
        wanted = [entry for entry in entries if entry.name not in initial and not _of_layer(entry.name, leave)]
        aside = (OPTIMIZER,) * (state.optimizer is None) + (AVERAGE,) * (state.averages is None)
        taken = [*(entry.name for entry in wanted), *of_frozen(state.tensors, saved)]
        _require_fit(saved, wanted, taken, aside, process_group, title)
        share = rank_in(process_group), size_of(process_group)
        run_on_all_ranks(process_group, lambda: require_intact(path, metadata, *share), f"cannot load {path}:")
        run_on_all_ranks(process_group, lambda: read_boxes(path, saved, wanted), f"cannot load {path}:")
        if state.optimizer is not None:
            state.optimizer.state.update(states)
        missing = tuple(sorted(set(chain(*gather(process_group, initial)))))
        return LoadedState(
            metadata.iteration, metadata.consumed_samples, metadata.extra, path, averaged=averaged, initial=missing
        )

    loaded, remarks = _first_intact(folder, step, process_group, load)
    return replace(loaded, remarks=remarks)


def _of_layer(name: str, layer: str | None) -> bool:
    return layer is not None and name.startswith(f"{layer}.")


def _first_intact(
    folder: PathLike, step: int | None, process_group: Group, load: Callable[[Path], T]
) -> tuple[T, tuple[str, ...]]:
    """Tries to load one checkpoint after the other until one is intact; what it gave, and what to tell the user.

    Args:
        step: try this iteration only; None begins with the latest.
        load: raises DamagedError on all ranks or on none.
    Raises:
        DamagedError: none is intact; lists what is wrong with each. Otherwise whatever `choose` and `load` raise.
    """
    choice = broadcast_result(process_group, lambda: choose(Path(folder), step))
    remarks = list(choice.remarks)
    for path in choice.paths:
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
    taken: Iterable[str],
    aside: tuple[str, ...],
    process_group: Group,
    title: str,
) -> None:
    """Raises CheckpointError on every rank where a tensor is missing, of another shape or of a type that would lose
    digits, or where no rank takes one that is saved.

    Args:
        taken: names of all that this rank has a use for.
        aside: beginnings of names that are left aside on purpose.
    """
    problems = []
    for entry in entries:
        told = saved.get(entry.name)
        if told is None:
            problems.append(f"{entry.name}: not in the checkpoint")
        elif told.shape != entry.shard.global_shape:
            problems.append(f"{entry.name}: saved with shape {list(told.shape)}, now {list(entry.shard.global_shape)}")
        elif not _keeps_values(getattr(torch, told.dtype), entry.tensor.dtype):
            able = [name for name, precision in PRECISIONS.items() if precision.weights == told.dtype]
            advice = f"; load it with --precision {' or '.join(able)}" if able else ""
            problems.append(f"{entry.name}: saved as {told.dtype}, {entry.tensor.dtype} cannot hold it{advice}")
    here = set(taken)
    mine = sum(1 << bit for bit, name in enumerate(saved) if name in here)  # all names of thousands of ranks are long
    reports = gather(process_group, (mine, problems))
    anywhere = reduce(or_, (bits for bits, _ in reports))
    unused = [
        f"{name}: saved, but nothing here takes it"
        for bit, name in enumerate(saved)
        if not anywhere >> bit & 1 and not name.startswith(aside)
    ]
    raise_problems(title, [*chain(*(found for _, found in reports)), *unused])


def _keeps_values(source: torch.dtype, target: torch.dtype) -> bool:
    """True when every value of one type is a value of the other, so that a conversion is exact."""
    if source.is_floating_point != target.is_floating_point:
        return False
    try:
        return torch.promote_types(source, target) == target
    except RuntimeError:  # torch promotes no float8
        return False


# --- whole tensors


def load_global_tensors(
    folder: PathLike, step: int | None = None, *, prefix: str = "", with_optimizer: bool = False
) -> dict[str, Tensor]:
    """Whole tensors of a checkpoint by global name, on the CPU, in one process.

    Warns when it is not the latest that they are of, because that one is damaged.

    Args:
        prefix: only names that start so.
        with_optimizer: the optimizer's state and the average of the weights too.

    Raises:
        CheckpointError: as `load_checkpoint`.
    """

    def load(path: Path) -> dict[str, Tensor]:
        metadata = read_metadata(path)
        require_intact(path, metadata)
        tensors = {
            name: torch.empty(told.shape, dtype=getattr(torch, told.dtype))
            for name, told in metadata.tensors.items()
            if name.startswith(prefix) and (with_optimizer or not name.startswith(BESIDE))
        }
        whole = [ShardedTensor(name, value, Shard(tuple(value.shape)), False) for name, value in tensors.items()]
        read_boxes(path, metadata.tensors, whole)
        return tensors

    tensors, remarks = _first_intact(folder, step, None, load)
    for remark in remarks:
        warnings.warn(remark, stacklevel=2)
    return tensors


def verify_checkpoint(path: Path) -> Iterator[tuple[int, str | None]]:
    """Reads every byte of one checkpoint (`.../iter_0000100`) and checks it.

    Yields:
        for each file the number of its bytes, and what is wrong with it, or None.
    Raises:
        CheckpointError: the description of the files is damaged itself.
    """
    with reading(path):
        metadata = read_metadata(path)
        for name, found in damage(path, metadata):
            yield metadata.files[name].bytes, found


def load_globals_into(
    tensors: Iterable[ShardedTensor], values: Mapping[str, Tensor], process_group: Group = None
) -> None:
    """Copies this rank's part of every global tensor into the model, converted to the model's dtype.

    Collective over `process_group`, the group of all ranks (None for a process on its own): together they
    must take exactly the tensors given.

    Raises:
        CheckpointError: on every rank, before anything is changed: a tensor is missing, one is taken by
            no rank, or a shape differs.
    """
    entries = list(tensors)
    reports = gather(process_group, ([entry.name for entry in entries], list(_mismatches(entries, values))))
    unexpected = set(values) - {name for names, _ in reports for name in names}
    problems = [problem for _, found in reports for problem in found]
    problems += [f"{name}: given, but this model has no such tensor" for name in unexpected]
    raise_problems("these weights are not this model's:", problems)
    with torch.no_grad():
        for entry in entries:
            for piece in entry.shard.pieces():
                piece.of_local(entry.tensor).copy_(piece.of_global(values[entry.name]))


def _mismatches(entries: Iterable[ShardedTensor], values: Mapping[str, Tensor]) -> Iterator[str]:
    for entry in entries:
        value = values.get(entry.name)
        if value is None:
            yield f"{entry.name}: missing"
        elif not isinstance(value, Tensor):
            yield f"{entry.name}: is a {type(value).__name__}, not a tensor"
        elif entry.tensor.is_floating_point() and not value.is_floating_point():
            yield f"{entry.name}: has values of {value.dtype}, this model needs {entry.tensor.dtype}"
        elif tuple(value.shape) != entry.shard.global_shape:
            needed = list(entry.shard.global_shape)
            yield f"{entry.name}: has shape {list(value.shape)}, this model needs {needed}"
