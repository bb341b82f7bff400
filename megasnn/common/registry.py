"""Registries of names: one for each kind of name, asked by everything that takes such a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic_core import CoreSchema, core_schema

Entry = TypeVar("Entry")


class Registry(dict[str, Entry]):
    """Entries of one kind by name, in the order in which they are shown.

    An entry of one's own is put in, as into any dictionary, before flags are read. As an annotation of a field,
    `loss: Annotated[str, LOSSES]`, it lets pydantic refuse names that it lacks.

    Attributes:
        flag: by which a user gives the name.
        also: names that the flag takes besides: they leave the choice among the entries to a search.
        refused: names that one may look for here, and why there is no such entry.
    """

    def __init__(
        self,
        flag: str,
        entries: Mapping[str, Entry],
        also: tuple[str, ...] = (),
        refused: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(entries)
        self.flag, self.also, self.refused = flag, also, refused

    @property
    def choices(self) -> tuple[str, ...]:
        """Names that the flag takes."""
        return (*self.also, *self)

    def of_argument(self, argument: str, name: str) -> Entry:
        """The entry of a name that code gives as `argument`. Raises ValueError for a name that the registry lacks."""
        if name not in self:
            raise ValueError(f"unknown {argument}={name!r}; it is one of {', '.join(self)}")
        return self[name]

    def known(self, name: str) -> str:
        """The name, where the flag takes it. Raises ValueError for others."""
        if name not in self.also:
            self[name]
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], CoreSchema]) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.known, handler(source))

    __hash__ = object.__hash__  # type: ignore[assignment]  # typing keeps annotations in sets

    def __missing__(self, name: str) -> Entry:
        """Raises ValueError: `registry[name]` refuses a name that it lacks."""
        if name in self.refused:
            raise ValueError(f"{self.flag} {name}: {self.refused[name]}")
        raise ValueError(f"unknown {self.flag} {name!r}; {self.flag} takes one of {', '.join(self.choices)}")


def later(path: str) -> Callable[..., Any]:
    """The function at "module:name", imported when it is first called: a registry needs no torch to list what does."""
    module, name = path.split(":")

    def call(*args: Any, **options: Any) -> Any:
        return getattr(import_module(module), name)(*args, **options)

    return call
