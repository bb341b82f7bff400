"""What needs a gradient, found out by a dry run: layers of ours give shapes there, which have no history."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from megasnn.layers.channels import cut_of, mark_cut

OURS = "megasnn."
"""Classes from there hand gradients on."""


@contextmanager
def showing_need_of_gradient() -> Iterator[None]:
    """Inside, tensors of a dry run need a gradient where those of a step would."""
    hook = register_module_forward_hook(_needing)
    try:
        with torch.enable_grad():
            yield
    finally:
        hook.remove()


def _needing(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    """The output of a layer of ours, which a gradient leads through; None for what tells by itself, and where someone
    else's class has a part in it, which may have cut it off."""
    if not isinstance(output, Tensor) or output.requires_grad or not output.is_floating_point():
        return None
    if not _is_from(module, OURS) or not all(_is_from(each, OURS, "torch.") for each in module.modules()):
        return None
    sources = [*module.parameters(), *(each for each in inputs if isinstance(each, Tensor))]
    # A product, since what is no leaf may be changed in place.
    return mark_cut(output.requires_grad_() * 1, cut_of(output)) if any(x.requires_grad for x in sources) else None


def _is_from(module: nn.Module, *packages: str) -> bool:
    return type(module).__module__.startswith(packages)
