"""Autograd functions without detours on the way to torch's engine."""

from __future__ import annotations

from typing import Any, NoReturn

import torch


class Function(torch.autograd.Function):
    """Autograd function for torch's engine alone; functorch's transforms refuse it."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        # torch's `apply` first takes functorch's wrappers off every argument, by a dozen calls of Python. A function
        # without `setup_context` never gets such arguments.
        engine: Any = super(torch.autograd.Function, cls)
        return engine.apply(*args)


def refuse_second_derivative() -> NoReturn:
    """Raises RuntimeError: for a backward in which autograd records, while kernels have first derivatives only."""
    # torch's `once_differentiable` does the same by eight calls of Python in every backward.
    raise RuntimeError("spiking neurons have no second derivatives: call backward without create_graph=True")
