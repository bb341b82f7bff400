"""Stand-ins for libraries that read command lines and files, so that training steps run where these are missing."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock

from torch import Tensor

READERS = (
    *("pydantic", "pydantic.dataclasses", "pydantic_core", "tyro", "tyro.conf", "safetensors", "safetensors.torch"),
    *("PIL", "tqdm", "tqdm.contrib", "tqdm.contrib.concurrent", "webdataset", "webdataset.gopen"),
    *("webdataset.shardlists", "webdataset.tariterators", "webdataset.writer"),
)
"""Libraries of command lines and files with their modules, which training steps do not need."""


class _TypeAdapter:
    """Values of a dataclass, unchecked."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def validate_python(self, values: Any, **_: Any) -> Any:
        return self._kind(**values)

    def validate_json(self, text: str, **_: Any) -> Any:
        return self._kind(**json.loads(text))


def do_without_libraries() -> None:
    """Puts stand-ins into the place of libraries that are missing."""
    for name in READERS:
        if not _is_there(name.partition(".")[0]):
            sys.modules[name] = MagicMock(__path__=[])
    if isinstance(sys.modules.get("pydantic"), MagicMock):
        pydantic: Any = sys.modules["pydantic"]
        pydantic.TypeAdapter, pydantic.ValidationError = _TypeAdapter, type("ValidationError", (ValueError,), {})
        pydantic.with_config = lambda *_, **__: lambda kind: kind
        decorator: Any = sys.modules["pydantic.dataclasses"]
        decorator.dataclass = lambda config=None, **options: dataclasses.dataclass(**options)
    if not _is_there("spikingjelly"):
        from megasnn.kernels import SURROGATES

        gradients: dict[str, Any] = {"sigmoid": _sigmoid_gradient, "atan": _atan_gradient}
        for name, gradient in gradients.items():
            SURROGATES[name] = SURROGATES[name]._replace(gradient=gradient)


def _is_there(name: str) -> bool:
    try:
        return not isinstance(sys.modules.get(name), MagicMock) and find_spec(name) is not None
    except ImportError:
        return False


def _sigmoid_gradient(x: Tensor, alpha: float) -> Tensor:
    fired = (alpha * x).sigmoid()
    return (1 - fired) * fired * alpha


def _atan_gradient(x: Tensor, alpha: float) -> Tensor:
    return alpha / 2 / (1 + (math.pi / 2 * alpha * x) ** 2)
