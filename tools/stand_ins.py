"""Stand-ins for libraries that read command lines and files, so that training steps run where these are missing."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

from torch import Tensor

READERS = ("pydantic", "pydantic_core", "tyro", "safetensors", "PIL", "tqdm", "webdataset")
"""Libraries of command lines and files, which training steps do not need."""


class _Anything:
    """Stands for what a missing library has: its attributes, calls and items are such objects again."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return arguments[0] if arguments and callable(arguments[0]) else _Anything()  # a decorator gives its function

    def __getitem__(self, key: object) -> Any:
        return self


class _TypeAdapter:
    """Values of a dataclass, unchecked."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def validate_python(self, values: Any, **_: Any) -> Any:
        return self._kind(**values)

    def validate_json(self, text: str, **_: Any) -> Any:
        return self._kind(**json.loads(text))


STAND_INS: dict[str, Any] = {
    "dataclass": lambda config=None, **options: dataclasses.dataclass(**options),
    "TypeAdapter": _TypeAdapter,
    "ValidationError": type("ValidationError", (ValueError,), {}),
    "tqdm": lambda items, **_: items,
}


def _stand_in(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return STAND_INS.get(name, _Anything())


class _Missing:
    """Finds stand-ins for libraries that are missing."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        loader: Any = self
        return ModuleSpec(name, loader, is_package=True) if name.partition(".")[0] in self._names else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        module.__getattr__ = _stand_in


def do_without_libraries() -> None:
    """Puts stand-ins into the place of libraries that are missing."""
    missing = [name for name in READERS if not _is_there(name)]
    finder: Any = _Missing(missing)
    sys.meta_path.insert(0, finder)
    if not _is_there("spikingjelly"):
        from megasnn.kernels import SURROGATES

        gradients: dict[str, Any] = {"sigmoid": _sigmoid_gradient, "atan": _atan_gradient}
        for name, gradient in gradients.items():
            SURROGATES[name] = SURROGATES[name]._replace(gradient=gradient)


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ImportError:
        return False


def _sigmoid_gradient(x: Tensor, alpha: float) -> Tensor:
    fired = (alpha * x).sigmoid()
    return (1 - fired) * fired * alpha


def _atan_gradient(x: Tensor, alpha: float) -> Tensor:
    return alpha / 2 / (1 + (math.pi / 2 * alpha * x) ** 2)
