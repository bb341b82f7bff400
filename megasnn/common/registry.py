"""Registries: one for each kind of name, read by everything that accepts it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic_core import CoreSchema, core_schema

Entry = TypeVar("Entry")


class Registry(dict[str, Entry]):
    """Entries by name, in display order. Users may add entries before flags are read.

    In an annotation, `loss: Annotated[str, LOSSES]`, pydantic refuses unknown names.

    Attributes:
        flag: on the command line.
        also: names that leave the choice to a search.
        refused: names that users may expect, with the reason.
    """

    def __init__(
        self,
        flag: str,
        entries: Mapping[str, Entry],
        also: tuple[str, ...] = (),
        refused: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(entries)
        self.flag = flag
        self.also = also
        self.refused = refused

    @property
    def choices(self) -> tuple[str, ...]:
        return (*self.also, *self)

    def of_argument(self, argument: str, name: str) -> Entry:
        """Raises ValueError for an unknown name."""
        if name not in self:
            raise ValueError(f"unknown {argument}={name!r}; it is one of {', '.join(self)}")
        return self[name]

    def known(self, name: str) -> str:
        """Raises ValueError for a name unknown to the flag."""
        if name not in self.also:
            self[name]
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], CoreSchema]) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.known, handler(source))

    __hash__ = object.__hash__  # type: ignore[assignment]  # typing keeps annotations in sets

    def __missing__(self, name: str) -> Entry:
        """Raises ValueError for an unknown name."""
        if name in self.refused:
            raise ValueError(f"{self.flag} {name}: {self.refused[name]}")
        raise ValueError(f"unknown {self.flag} {name!r}; {self.flag} takes one of {', '.join(self.choices)}")


def later(path: str) -> Callable[..., Any]:
    """Function at "module:name", imported at its first call."""
    module, name = path.split(":")

    def call(*args: Any, **options: Any) -> Any:
        # A late import: a registry must not need torch.
        return getattr(import_module(module), name)(*args, **options)

    return call
