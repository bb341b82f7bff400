"""Plain modules that a user has compiled with torch.compile, as layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def compiling_itself(module: nn.Module) -> nn.Module:
    """The modules that torch.compile wrapped, which then compile their own call: names stay as they were."""
    inner: Any = getattr(module, "_orig_mod", None)
    if inner is not None:
        compiler: Any = module.dynamo_ctx
        inner._compiled_call_impl = compiler(inner._call_impl)
        return compiling_itself(inner)
    for name, child in module.named_children():
        setattr(module, name, compiling_itself(child))
    return module


@contextmanager
def uncompiled_in_dry_runs(layer: nn.Module, x: Tensor) -> Iterator[None]:
    """Inside, a dry run compiles nothing."""
    compiled = [each for each in layer.modules() if each._compiled_call_impl is not None] if x.is_meta else []
    kept = [each._compiled_call_impl for each in compiled]
    for each in compiled:
        each._compiled_call_impl = None
    try:
        yield
    finally:
        for each, call in zip(compiled, kept, strict=True):
            each._compiled_call_impl = call
