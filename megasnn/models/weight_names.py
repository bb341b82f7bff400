"""Tables of names: how a tensor of one program is made from tensors of another."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megasnn.config.checks import flag
from megasnn.files import CheckpointError, raise_problems

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
            given = ", ".join(f"{name} {list(value.shape)}" for name, value in zip(self.sources, tensors, strict=True))
            raise CheckpointError(f"these tensors do not fit together: {given}: {error}") from None


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
        incoming: their names, and the model's configuration where it is known -> how each of ours is made.
        outgoing: the same, from our names to theirs.
        is_unused: whether their model holds a tensor of this name without computing anything from it.
    """

    name: str
    title: str
    marker: str
    incoming: Callable[[Collection[str], ModelValues | None], NameMap]
    outgoing: Callable[[Collection[str], ModelValues | None], NameMap]
    is_unused: Callable[[str], bool] = lambda name: False

    def to_ours(self, names: Collection[str], model: ModelValues | None = None) -> NameMap:
        """Raises CheckpointError that lists what is missing and unexpected, in their names."""
        recipe = self.incoming(names, model)
        used = [name for name in names if not self.is_unused(name)]
        require_equal(sources(recipe), used, f"these are not the tensors of {self.title}:")
        return recipe

    def from_ours(self, names: Collection[str], model: ModelValues | None = None) -> NameMap:
        """Raises CheckpointError that lists what is missing and unexpected, in our names."""
        try:
            recipe = self.outgoing(names, model)
        except CheckpointError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"config.model: {self.title} has no such model: {error}") from None
        require_equal(sources(recipe), names, f"these are not the tensors of a model that is {self.title}:")
        return recipe


def values_of(recipe: NameMap, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a recipe, made from those of the other program."""
    return {name: made.of(tensors[source] for source in made.sources) for name, made in recipe.items()}


def renamed(names: Mapping[str, str]) -> NameMap:
    """A recipe that only renames: new name -> old name."""
    return {new: Made((old,)) for new, old in names.items()}


def sources(recipe: NameMap) -> set[str]:
    """All names that a recipe takes."""
    return {name for made in recipe.values() for name in made.sources}


def require_equal(expected: Iterable[str], given: Iterable[str], title: str) -> None:
    """Raises CheckpointError that lists the names missing and unexpected, when there are any."""
    expected, given = set(expected), set(given)
    missing = [f"{name}: missing" for name in expected - given]
    raise_problems(title, missing + [f"{name}: unexpected" for name in given - expected])


def inverse(names: Mapping[str, str]) -> dict[str, str]:
    """A table of names the other way round."""
    return {there: here for here, there in names.items()}


def unit_prefixes(units: Mapping[str, tuple[str, tuple[str, ...]]]) -> dict[str, str]:
    """Paths for `prefix_dialect`: our unit -> (their path, and in it their convolution, norm and neuron)."""
    return {
        f"{unit}.{part}": f"{path}.{name}"
        for unit, (path, names) in units.items()
        for part, name in zip(("conv", "norm", "neuron"), names, strict=True)
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
        return renamed(moved(ours, prefixes))

    return Dialect(
        name,
        title,
        marker,
        incoming=lambda theirs, model: renamed(moved(theirs, inverse(prefixes))),
        outgoing=outgoing,
    )


def moved(names: Collection[str], prefixes: Mapping[str, str]) -> dict[str, str]:
    """New name -> old name, for those names whose module is among the `prefixes`, old -> new."""
    patterns = [
        (re.compile(re.escape(old).replace(r"\{\}", r"(\d+)") + r"\.([^.]+)"), new) for old, new in prefixes.items()
    ]
    found = {}
    for name in names:
        for pattern, new in patterns:
            match = pattern.fullmatch(name)
            if match:
                *numbers, tensor = match.groups()
                found[f"{new.format(*numbers)}.{tensor}"] = name
    return found
