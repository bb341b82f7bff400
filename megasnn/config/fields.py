"""Types of fields with their bounds."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Count = Annotated[int, Field(ge=0)]
"""From 0 on."""
Size = Annotated[int, Field(ge=1)]
"""From 1 on."""
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]
