"""Loading a checkpoint of any layout into this rank's tensors; only the bytes that the rank needs are read.

What does not fit is refused on all ranks, with the same words, before anything of the model or the optimizer has
changed. What is damaged is found while it is read, and named; then the newest checkpoint that is intact takes its
place, unless one was asked for by its iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from operator import or_
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megasnn.checkpoint import folder as folders
from megasnn.checkpoint.choice import choose
from megasnn.checkpoint.compare import (
    Narrower,
    marked,
    marks,
    model_differences,
    tensor_differences,
    type_problems,
    unused_tensors,
)
from megasnn.checkpoint.description import AVERAGE, PREFIX, Metadata, read_metadata
from megasnn.checkpoint.files import PieceReader
from megasnn.checkpoint.optimizer_state import States, allocate, describe, of_frozen, require_possible
from megasnn.checkpoint.pieces import SavedTensor, read_pieces
from megasnn.checkpoint.planner import plan_reading
from megasnn.checkpoint.saving import PathLike, require_names
from megasnn.comm.agreement import all_do, first_decides, gather, rank_in, size_of
from megasnn.files.problems import CheckpointError, DamagedError, raise_problems
from megasnn.sharded_tensors import ShardedTensor

Group = dist.ProcessGroup | None
T = TypeVar("T")


@dataclass(frozen=True)
class LoadedState:
    """Where the loaded run stood: completed iterations, samples seen, and what was saved as `extra`.

    `path` is the checkpoint that was loaded. `remarks` say why it is not the one that was to be expected; the user
    must see them. `averaged` says whether averages were loaded.
    """

    iteration: int
    consumed_samples: int
    extra: dict[str, Any]
    path: Path
    remarks: tuple[str, ...] = ()
    averaged: bool = False


def load_checkpoint(
    folder: PathLike,
    *,
    tensors: Sequence[ShardedTensor],
    optimizer: torch.optim.Optimizer | None = None,
    optimizer_state: Collection[str] = (),
    owned: Sequence[ShardedTensor] | None = None,
    model: str | None = None,
    config: dict[str, Any] | None = None,
    step: int | None = None,
    process_group: Group = None,
    refuse: Callable[[Metadata], Iterable[str]] = lambda metadata: (),
    leave: str | None = None,
    averages: Sequence[ShardedTensor] | None = None,
) -> LoadedState:
    """Loads the checkpoint of iteration `step`, or the latest that is intact, into this rank's tensors and optimizer.

    It may come from any layout. The optimizer's state is replaced; its hyperparameters are not touched.
    Collective over `process_group` (the group of all ranks; None for a process on its own).

    Args:
        optimizer: None leaves the saved optimizer state aside (--finetune, --no-load-optim).
        optimizer_state: kinds of state that this optimizer keeps of each parameter, which must be there.
        owned: what this rank's optimizer has of the tensors; None: the tensors themselves.
        model: name of the model, which must be the saved one where a checkpoint says it; None accepts any.
        config: must equal the saved one; None accepts any model whose tensors fit (--finetune).
        refuse: problems that the caller sees with this checkpoint.
        leave: a layer whose tensors stay as they are, whatever the checkpoint holds of them (--reset-head).
        averages: of this rank's tensors; they are loaded where the checkpoint has them. None leaves those aside.

    Raises:
        NoCheckpointError: on every rank, when there is no checkpoint at all.
        DamagedError: on every rank, when files are missing, cut or altered, of the checkpoint of this step or of all
            that there are. The tensors may then hold part of what was read.
        CheckpointError: on every rank, when this step does not exist, the model is another one (names both), its
            configuration differs (lists the fields), tensors are missing, unexpected, of another shape or of a
            precision that would be lost, or the optimizer is of another kind or has no saved state. Nothing has
            changed then.
    """
    wanted = [entry for entry in tensors if not _of_layer(entry.name, leave)]
    stepped = wanted if owned is None else [entry for entry in owned if not _of_layer(entry.name, leave)]

    def load(path: Path) -> LoadedState:
        metadata, saved = all_do(process_group, lambda: _read_descriptions(path, process_group), f"cannot load {path}:")
        averaged = averages is not None and any(name.startswith(AVERAGE) for name in metadata.tensors)
        more = averages if averages is not None and averaged else ()
        title = f"the checkpoint {path} does not fit this run:"

        def prepare() -> tuple[list[ShardedTensor], States]:
            require_names(tensors)
            if problems := [*model_differences(metadata, model, config, optimizer), *refuse(metadata)]:
                raise CheckpointError(*problems)
            states = allocate(stepped, optimizer, metadata.tensors, optimizer_state) if optimizer is not None else {}
            return [*wanted, *more, *describe(stepped, states)], states

        entries, states = all_do(process_group, prepare, title)

        def compared() -> tuple[int, list[str], Narrower]:
            mine, problems, narrower = tensor_differences(metadata.tensors, entries)
            bits = marks([*mine, *of_frozen(wanted, metadata.tensors)], metadata.tensors)
            return bits, problems, narrower

        reports = gather(process_group, all_do(process_group, compared, title))
        taken = marked(reduce(or_, (bits for bits, _, _ in reports)), metadata.tensors)
        names = [name for name in metadata.tensors if not _of_layer(name, leave)]
        left = (PREFIX,) * (optimizer is None) + (AVERAGE,) * (averages is None)
        unexpected = unused_tensors(names, taken, left)
        narrowed = type_problems(narrower for _, _, narrower in reports)
        raise_problems(title, [*chain(*(problems for _, problems, _ in reports)), *narrowed, *unexpected])
        read_tensors(path, saved, entries, process_group)
        if optimizer is not None:
            all_do(process_group, lambda: require_possible(states, stepped), title)
            optimizer.state.update(states)
        return LoadedState(metadata.iteration, metadata.consumed_samples, metadata.extra, path, averaged=averaged)

    state, remarks = first_intact(folder, step, process_group, load)
    return replace(state, remarks=remarks)


def _of_layer(name: str, layer: str | None) -> bool:
    return layer is not None and name.startswith(f"{layer}.")


def first_intact(
    folder: PathLike, step: int | None, process_group: Group, load: Callable[[Path], T]
) -> tuple[T, tuple[str, ...]]:
    """Tries to load one checkpoint after the other until one is intact; what it gave, and what to tell the user.

    Args:
        step: try this iteration only; None begins with the latest.
        load: raises DamagedError on all ranks or on none.
    Raises:
        DamagedError: none is intact; lists what is wrong with each. Otherwise whatever `choose` and `load` raise.
    """
    choice = first_decides(process_group, lambda: choose(Path(folder), step))
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


def _read_descriptions(path: Path, process_group: Group) -> tuple[Metadata, dict[str, SavedTensor]]:
    metadata = read_metadata(path, rank_in(process_group), size_of(process_group))
    return metadata, read_pieces(path, metadata)


def read_tensors(
    path: Path, saved: Mapping[str, SavedTensor], entries: Iterable[ShardedTensor], process_group: Group
) -> None:
    """Reads this rank's part of the given tensors, and checks every byte of it; collective.

    Raises:
        DamagedError: on every rank, when bytes that some rank needs are missing or altered.
        CheckpointError: a tensor is not saved, or has another shape.
    """

    def read() -> None:
        with folders.reading(path):
            PieceReader(path).read(plan_reading(entries, saved))

    all_do(process_group, read, f"cannot read the checkpoint {path}:")
