"""Name tables: one program's tensors, made from another's."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megasnn.common.files import CheckpointError, raise_problems
from megasnn.config.checks import flag

if TYPE_CHECKING:
    from torch import Tensor

NORM_TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Made:
    """One program's tensor, made from another's.

    Attributes:
        sources: the other program's tensor names.
        make: computes the tensor from its sources in order, on the meta device for its shape; None for no change.
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
        # A file may hold tensors of any shape and type under these names.
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise CheckpointError(f"{', '.join(self.sources)} do not fit together: {error}") from None


NameMap = Mapping[str, Made]
ModelValues = Mapping[str, Any]
"""Configuration of a model and its neuron in a checkpoint."""


@dataclass(frozen=True)
class Dialect:
    """One model's tensor names in another program.

    Attributes:
        name: the program, on the command line.
        title: program and model, for messages.
        marker: a tensor name unique to this dialect, present at every size.
        incoming: makes our tensors from their names.
        outgoing: makes theirs from our names, and the model's configuration if known; None if impossible.
        unused: endings of tensor names that their model never reads.
        ties: our tensors that a model may tie -> their owners. The other program's files have both.
    """

    name: str
    title: str
    marker: str
    incoming: Callable[[Collection[str]], NameMap]
    outgoing: Callable[[Collection[str], ModelValues | None], NameMap] | None
    unused: tuple[str, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)

    def to_ours(self, names: Collection[str]) -> NameMap:
        """Raises CheckpointError with missing and unexpected names, in the other program's words."""
        recipe = self.incoming(names)
        # Their model never reads these: they may be there or not.
        used = [name for name in names if not name.endswith(self.unused)]
        _require_sources(recipe, used, self.title)
        return recipe

    def from_ours(self, names: Collection[str], model: ModelValues | None = None) -> NameMap:
        """Raises CheckpointError with missing and unexpected names, in MegaSNN's words."""
        if self.outgoing is None:
            raise CheckpointError(f"no names of {self.title} are given: export with --names spikingjelly, or megasnn")
        recipe = self.outgoing(names, model)
        _require_sources(recipe, names, self.title)
        return recipe

    def without_copies(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our tensors without tied ones that equal their owners: those of a tied model."""
        kept = dict(tensors)
        for copy, owner in self.ties.items():
            if copy in kept and kept[copy].dtype == kept[owner].dtype and kept[copy].equal(kept[owner]):
                del kept[copy]
        return kept


def _require_sources(recipe: NameMap, names: Iterable[str], title: str) -> None:
    found = set(names)
    needed: set[str] = set()
    for made in recipe.values():
        needed.update(made.sources)
    missing = [f"{name}: missing" for name in needed - found]
    unexpected = [f"{name}: unexpected" for name in found - needed]
    raise_problems(f"these are not the tensors of {title}:", missing + unexpected)


def translated_tensors(recipe: NameMap, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, made in recipe.items():
        found[name] = made.of([tensors[source] for source in made.sources])
    return found


def renamed(names: Mapping[str, str]) -> NameMap:
    """A recipe without computation: new name -> old name."""
    return {new: Made((old,)) for new, old in names.items()}


def conv_norm_prefixes(conv_norms: Mapping[str, tuple[str, tuple[str, ...]]]) -> dict[str, str]:
    """Prefixes for `prefix_dialect`.

    Args:
        conv_norms: our ConvNormNeuron path -> (their path, their names for convolution, norm and perhaps neuron).
    """
    prefixes = {}
    for conv_norm, (path, names) in conv_norms.items():
        # Not strict: a block without a neuron has two names.
        for part, name in zip(("conv", "norm", "neuron"), names, strict=False):
            prefixes[f"{conv_norm}.{part}"] = f"{path}.{name}"
    return prefixes


def prefix_dialect(
    name: str, title: str, *, marker: str, prefixes: Mapping[str, str], lacks: Mapping[str, Any] | None = None
) -> Dialect:
    """A dialect with equal tensors under other module paths.

    Args:
        prefixes: our module path -> theirs. Each `{}` stands for a number, equal on both sides.
        lacks: our configuration's values without a counterpart there.
    """

    def outgoing(ours: Collection[str], model: ModelValues | None) -> NameMap:
        for lacking, value in (lacks or {}).items():
            # A file of weights alone has no configuration to check.
            if model is not None and model.get(lacking) == value:
                raise CheckpointError(f"{title} has no {flag(lacking)} {value}")
        return moved(ours, prefixes)

    back = {theirs: ours for ours, theirs in prefixes.items()}
    return Dialect(name, title, marker, incoming=lambda theirs: moved(theirs, back), outgoing=outgoing)


def moved(names: Collection[str], prefixes: Mapping[str, str]) -> NameMap:
    """Renames modules' tensors, old path -> new path."""
    patterns = []
    for old, new in prefixes.items():
        # re.escape has escaped the braces, too.
        path = re.escape(old).replace(r"\{\}", r"(\d+)")
        patterns.append((re.compile(path + r"\.([^.]+)"), new))
    found = {}
    for name in names:
        for pattern, new in patterns:
            match = pattern.fullmatch(name)
            if match:
                *numbers, tensor = match.groups()
                found[f"{new.format(*numbers)}.{tensor}"] = name
    return renamed(found)
