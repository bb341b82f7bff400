"""Values between layers: a tensor, or a bundle, which is a tuple or a dict of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

Bundle = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
EntryKey = int | str | None
"""Key of an entry in an output: index in a tuple, key in a dict, None for a single tensor."""


def entries_of(output: Any) -> dict[EntryKey, Tensor]:
    """A layer output's tensors by key. Raises ValueError for another type, or no tensors."""
    if isinstance(output, Tensor):
        return {None: output}
    kind = type(output).__name__
    entries: dict[Any, Any]
    if isinstance(output, tuple):
        entries = dict(enumerate(output))
    elif isinstance(output, Mapping) and all(isinstance(key, str) for key in output):
        entries = dict(output)
    else:
        raise ValueError(f"a layer must return a tensor, or a tuple or dict (by name) of tensors, not a {kind}")
    if not entries:
        raise ValueError(f"a layer must return one tensor or more, not an empty {kind}")
    for key, entry in entries.items():
        if not isinstance(entry, Tensor):
            raise ValueError(f"entry {key!r} of a layer's output must be a tensor, not {type(entry).__name__}")
    return entries


def plain_bundle(output: Any) -> Any:
    """An output with plain tuples and dicts, as other stages receive it."""
    if isinstance(output, tuple):
        return tuple(output)
    return dict(output) if isinstance(output, Mapping) else output


def bundle_of(entries: Mapping[Any, Any]) -> Any:
    """Inverse of `entries_of`."""
    first = next(iter(entries))
    if first is None:
        return entries[first]
    return tuple(entries.values()) if isinstance(first, int) else dict(entries)


def map_entries(function: Callable[[Tensor], Any], output: Bundle) -> Any:
    if isinstance(output, Tensor):
        return function(output)
    return bundle_of({key: function(entry) for key, entry in entries_of(output).items()})


def logits_of(output: Bundle) -> Tensor:
    """Logits in the last layer's output: a dict's entry "logits", otherwise the first entry."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict) and "logits" in output:
        return output["logits"]
    return next(iter(entries_of(output).values()))


def shapes_text(*outputs: Bundle) -> str:
    """For messages: `[2, 2, 8]`, or `{'a': [2, 2, 8]}`."""
    return " and ".join(str(map_entries(lambda entry: list(entry.shape), output)) for output in outputs)
