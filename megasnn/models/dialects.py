"""All dialects, and which of them some names are in."""

from __future__ import annotations

from collections.abc import Collection

from megasnn.checkpoint.errors import CheckpointError
from megasnn.models.names import Dialect
from megasnn.models.spikformer import spikingjelly_names as spikformer
from megasnn.models.spikformer.published_names import published
from megasnn.models.vgg_dvs import spikingjelly_names as vgg_dvs

DIALECTS = (spikformer.SPIKINGJELLY, vgg_dvs.SPIKINGJELLY, published("cifar10"), published("imagenet"))


def is_ours(names: Collection[str]) -> bool:
    """Whether these are our own global names of some model."""
    return any(dialect.our_marker in names for dialect in DIALECTS)


def dialect_of(names: Collection[str]) -> Dialect:
    """The dialect of other programs' names. Raises CheckpointError when it is none of those known."""
    for dialect in DIALECTS:
        if dialect.marker in names:
            return dialect
    known = ", ".join(f"{dialect.marker} ({dialect.title})" for dialect in DIALECTS)
    raise CheckpointError(
        f"names like {', '.join(sorted(names)[:3]) or '(none)'} belong to no program known here; looked for {known}"
    )


def dialect_for(name: str, ours: Collection[str]) -> Dialect:
    """The dialect called `name` for the model whose tensors have our names `ours`.

    Raises CheckpointError when that program has no such model.
    """
    for dialect in DIALECTS:
        if dialect.name == name and dialect.our_marker in ours:
            return dialect
    known = ", ".join(dialect.title for dialect in DIALECTS)
    raise CheckpointError(f"there is no model of {name} with tensors like {sorted(ours)[0]}; known: {known}")
