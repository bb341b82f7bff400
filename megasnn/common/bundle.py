"""Values that go from layer to layer: a tensor, or a bundle, which is a tuple or a dict of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

Bundle = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
EntryKey = int | str | None
"""Which entry of an output: its place in a tuple, its key in a dict, None for a tensor by itself."""


def entries_of(output: Any) -> dict[EntryKey, Tensor]:
    """The tensors of a layer's output. Raises ValueError for an output of another kind."""
    if isinstance(output, Tensor):
        return {None: output}
    kind = type(output).__name__
    if isinstance(output, tuple):
        entries: dict[Any, Any] = dict(enumerate(output))
    elif isinstance(output, Mapping) and all(isinstance(key, str) for key in output):
        entries = dict(output)
    else:
        raise ValueError(f"a layer gives a tensor, or a tuple or a dict (by name) of tensors, not a {kind}")
    if not entries:
        raise ValueError(f"a layer gives one tensor or more, not an empty {kind}")
    for key, entry in entries.items():
        if not isinstance(entry, Tensor):
            raise ValueError(f"entry {key!r} is of type {type(entry).__name__}, where a layer gives tensors")
    return entries


def plain_bundle(output: Any) -> Any:
    """A tuple or dict of a class of its own as a plain one, which is what other stages get; anything else as it is."""
    if isinstance(output, tuple):
        return tuple(output)
    return dict(output) if isinstance(output, Mapping) else output


def bundle_of(entries: Mapping[Any, Any]) -> Any:
    """The tensor, tuple or dict that has these entries; also of what else is said of each entry."""
    first = next(iter(entries))
    if first is None:
        return entries[first]
    return tuple(entries.values()) if isinstance(first, int) else dict(entries)


def map_entries(function: Callable[[Tensor], Any], output: Bundle) -> Any:
    """The output with `function` of each tensor in the tensor's place."""
    if isinstance(output, Tensor):
        return function(output)
    return bundle_of({key: function(entry) for key, entry in entries_of(output).items()})


def logits_of(output: Bundle) -> Tensor:
    """The logits in what a model's last layer gives: the entry "logits" of a dict; otherwise the first entry."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict) and "logits" in output:
        return output["logits"]
    return next(iter(entries_of(output).values()))


def shapes_text(*outputs: Bundle) -> str:
    """The shapes of outputs, for messages: `[2, 2, 8]`, or `{'a': [2, 2, 8]}`."""
    return " and ".join(str(map_entries(lambda entry: list(entry.shape), output)) for output in outputs)
