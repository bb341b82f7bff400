"""Tables of names: how a tensor of one program is made from tensors of another."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megasnn.common.files import CheckpointError, raise_problems
from megasnn.config.checks import flag

if TYPE_CHECKING:
    from torch import Tensor

NORM_TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Made:
    """A tensor of one program, made from tensors of another.

    Attributes:
        sources: names of the tensors it is made from.
        make: takes them in this order; also called with tensors on the meta device, for its shape. None: as it is.
    """

    sources: tuple[str, ...]
    make: Callable[..., Tensor] | None = None

    def of(self, values: Iterable[Tensor]) -> Tensor:
        """Raises CheckpointError when the tensors do not fit together."""
        tensors = list(values)
        if self.make is None:
            return tensors[0]
        try:
            return self.make(*tensors)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise CheckpointError(f"{', '.join(self.sources)} do not fit together: {error}") from None


NameMap = Mapping[str, Made]
ModelValues = Mapping[str, Any]
"""A model's configuration as a checkpoint keeps it."""


@dataclass(frozen=True)
class Dialect:
    """The names that some program has for the tensors of one of our models.

    Attributes:
        name: of the program, as on the command line.
        title: of program and model, for messages.
        marker: a name that only this dialect has, in models of every size.
        incoming: their names -> how each of our tensors is made.
        outgoing: our names, and the model's configuration where it is known -> how each of theirs is made; None where
            there is no way back.
        unused: endings of the names of tensors that their model computes nothing from.
    """

    name: str
    title: str
    marker: str
    incoming: Callable[[Collection[str]], NameMap]
    outgoing: Callable[[Collection[str], ModelValues | None], NameMap] | None
    unused: tuple[str, ...] = ()

    def to_ours(self, names: Collection[str]) -> NameMap:
        """Raises CheckpointError that lists what is missing and unexpected, in their names."""
        recipe = self.incoming(names)
        _require_sources(recipe, [name for name in names if not name.endswith(self.unused)], self.title)
        return recipe

    def from_ours(self, names: Collection[str], model: ModelValues | None = None) -> NameMap:
        """Raises CheckpointError that lists what is missing and unexpected, in our names."""
        if self.outgoing is None:
            raise CheckpointError(f"no names of {self.title} are given: export with --names spikingjelly, or megasnn")
        recipe = self.outgoing(names, model)
        _require_sources(recipe, names, self.title)
        return recipe


def translated_tensors(recipe: NameMap, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a recipe, made from those of the other program."""
    return {name: made.of(tensors[source] for source in made.sources) for name, made in recipe.items()}


def renamed(names: Mapping[str, str]) -> NameMap:
    """A recipe that only renames: new name -> old name."""
    return {new: Made((old,)) for new, old in names.items()}


def _require_sources(recipe: NameMap, names: Iterable[str], title: str) -> None:
    needed, names = {name for made in recipe.values() for name in made.sources}, set(names)
    missing = [f"{name}: missing" for name in needed - names]
    unexpected = [f"{name}: unexpected" for name in names - needed]
    raise_problems(f"these are not the tensors of {title}:", missing + unexpected)


def conv_norm_prefixes(conv_norms: Mapping[str, tuple[str, tuple[str, ...]]]) -> dict[str, str]:
    """Paths for `prefix_dialect`: our unit -> (their path, and in it their convolution, norm and perhaps neuron)."""
    return {
        f"{conv_norm}.{part}": f"{path}.{name}"
        for conv_norm, (path, names) in conv_norms.items()
        for part, name in zip(("conv", "norm", "neuron"), names, strict=False)
    }


def prefix_dialect(
    name: str, title: str, *, marker: str, prefixes: Mapping[str, str], lacks: Mapping[str, Any] | None = None
) -> Dialect:
    """A dialect in which the tensors are the same, and names differ in the path of the module only.

    Args:
        name, title, marker: as in Dialect.
        prefixes: our path of a module -> theirs; `{}` stands for the same number on both sides, in the same order.
        lacks: values of our model's configuration with which theirs has no such model.
    """

    def outgoing(ours: Collection[str], model: ModelValues | None) -> NameMap:
        for field, value in (lacks or {}).items():
            if model is not None and model.get(field) == value:
                raise CheckpointError(f"{title} has no {flag(field)} {value}")
        return moved(ours, prefixes)

    back = {theirs: ours for ours, theirs in prefixes.items()}
    return Dialect(name, title, marker, incoming=lambda theirs: moved(theirs, back), outgoing=outgoing)


def moved(names: Collection[str], prefixes: Mapping[str, str]) -> NameMap:
    """A recipe that renames the tensors of the modules at these paths, old -> new."""
    patterns = [
        (re.compile(re.escape(old).replace(r"\{\}", r"(\d+)") + r"\.([^.]+)"), new) for old, new in prefixes.items()
    ]
    found = {}
    for name in names:
        for pattern, new in patterns:
            if match := pattern.fullmatch(name):
                *numbers, tensor = match.groups()
                found[f"{new.format(*numbers)}.{tensor}"] = name
    return renamed(found)
