"""Which trained parameters a step gave no gradient, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from megasnn.engine.model import DistributedModel
from megasnn.parallel.agreement import gather

_AT_MOST = 8  # names in a sentence


def names_without_gradient(model: DistributedModel) -> list[str]:
    """Of the parameters to which no backward has added anything yet, on no rank; frozen ones are not meant.

    A gradient of zeros is one: of a layer whose neurons are silent, and of one before a chunk that has no derivative,
    where layers are executed apart. Collective over the world.
    """
    missing = model.data_parallel.without_gradient
    here = {
        entry.name: entry.tensor in missing
        for chunk in model.chunks.values()
        for entry in (*chunk.copied_tensors(), *chunk.sharded_tensors())
        if entry.is_parameter and entry.tensor.requires_grad
    }
    of_ranks = gather(model.state.world.handle, here)
    learning = {name for each in of_ranks for name, is_missing in each.items() if not is_missing}
    known = {name for each in of_ranks for name in each} - learning
    return [entry.name for entry in model.described if entry.name in known]


def notice_of(names: Sequence[str]) -> str:
    """A sentence for the user."""
    more = f" and {len(names) - _AT_MOST} more" if len(names) > _AT_MOST else ""
    return (
        f"no gradient in the first step, so that nothing but weight decay changes them: {', '.join(names[:_AT_MOST])}"
        f"{more}. The loss does not depend on these parameters, or something without a derivative lies between"
    )
