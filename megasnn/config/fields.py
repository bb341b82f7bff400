"""Types of fields: bounds of numbers, names of registries; and their help."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import is_dataclass
from functools import cache
from typing import Annotated, Any

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from megasnn.registry import Registry

Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]


def _file_name(value: object) -> object:
    if not isinstance(value, str) or not value.strip():
        raise PydanticCustomError("file_name", "Input should be the name of a file or folder")
    return value


FileName = Annotated[str, PlainValidator(_file_name)]
"""A name that need not be UTF-8, as names of files need not."""


def registry_of(hint: Any) -> Registry[Any] | None:
    """The registry that a field's type takes a name from; None for other types."""
    return next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Registry)), None)


@cache
def help_texts(part: Any) -> dict[str, str]:
    """The text below each field of a dataclass, on one line; those that it inherits included."""
    texts: dict[str, str] = {}
    for each in reversed(part.__mro__):
        if not is_dataclass(each):
            continue
        try:
            source = inspect.getsource(each)  # type: ignore[arg-type]
        except OSError:  # a program that was typed in, or read from a pipe
            continue
        (body,) = ast.parse(textwrap.dedent(source)).body
        assert isinstance(body, ast.ClassDef)
        for entry, below in zip(body.body, body.body[1:], strict=False):
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name) and isinstance(below, ast.Expr):
                texts[entry.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return texts
