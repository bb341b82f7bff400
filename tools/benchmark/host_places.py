"""Places inside megasnn at which a host is made to work as in front of a GPU.

The host's benchmark knows the package's inside by the table below alone. It measures other checkouts, too: a place may
have several paths, the newest first, and the first existing one counts.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

Paths = tuple[str, ...]
"""`module:name` or `module:Class.name`."""

# Second paths are those of commit de4f1a79.
UNIT: Paths = ("megasnn.layers.blocks:ConvNormNeuron.forward",)
ATTENTION: Paths = ("megasnn.layers.attention:SpikingSelfAttention.forward",)
CHUNK: Paths = ("megasnn.pipeline.chunk:PipelineChunk.forward",)
EXECUTOR: Paths = ("megasnn.pipeline.executor:PipelineExecutor.run",)
WEIGHT_GRADIENTS: Paths = (
    "megasnn.layers.weight_grad:WeightGradients.run_or_defer",
    "megasnn.layers.weight_grad:WeightGradients.leave",
)
"""Takes the task of a weight gradient, and starts it or keeps it for later."""
CLIP: Paths = ("megasnn.optim.norms:GradientNorm.clip",)
LAUNCH: Paths = ("megasnn.kernels.triton.launch:Launch.__call__", "megasnn.kernels.triton.launch:launch")
"""Starts a kernel: (its launch, tensors ...), or (kernel, number of programs, arguments ...)."""
KERNELS = "megasnn.kernels.triton"
"""Package whose modules start kernels."""
INTERPRETED: Paths = ("megasnn.kernels.triton.available:interpreted",)
UNUSABLE: Paths = ("megasnn.kernels.triton.available:_unusable",)
USABLE_ON: Paths = ("megasnn.kernels.triton.available:usable_on",)
PREPARED: Paths = ("megasnn.kernels.backends:_prepared", "megasnn.kernels.backends:_fastest")
RUNS_AHEAD: Paths = ("megasnn.common.checks:runs_ahead", "megasnn.device_checks:runs_ahead")
IS_MATRIX_PRODUCT: Paths = ("megasnn.kernels.convolution:_is_matrix_product",)
ON_GPU: Paths = ("megasnn.kernels.layout:on_gpu", "megasnn.kernels.tensor_cores:on_gpu")
EMPTY: Paths = ("megasnn.kernels.layout:empty",)


def _is_matrix_product(images: Tensor, weight: Tensor, *_: Any) -> bool:
    """On a GPU only pointwise convolutions of images of one pixel are products."""
    return images.shape[2:] == weight.shape[2:] == (1, 1)


def _empty(shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=device)


# Answers of a GPU, for tensors that say that they are on the CPU.
_ANSWERS: dict[Paths, Any] = {
    INTERPRETED: lambda: True,  # on a CPU the kernels are then not refused
    UNUSABLE: lambda device: None,
    USABLE_ON: lambda device: True,
    PREPARED: {},
    RUNS_AHEAD: lambda device: True,
    IS_MATRIX_PRODUCT: _is_matrix_product,
    ON_GPU: lambda values: True,
    EMPTY: _empty,
}


def resolved(paths: Paths) -> tuple[Any, str]:
    """A place's module or class, and its name there.

    Raises:
        LookupError: none of the paths exists.
    """
    for path in paths:
        module_name, _, names = path.partition(":")
        *classes, name = names.split(".")
        holder: Any = _module(module_name)
        for each in classes:
            holder = getattr(holder, each, None)
        if holder is not None and hasattr(holder, name):
            return holder, name
    tree = getattr(sys.modules.get("megasnn"), "__file__", "megasnn")
    table = "tools/benchmark/host_places.py"
    raise LookupError(f"{tree} has no {' or '.join(paths)}: put its new place first in the table of {table}")


def _module(name: str) -> ModuleType | None:
    """A module, or None if its package's folder lacks it."""
    # No other finder is asked: an editable installation would offer another checkout's module.
    parent, _, _ = name.rpartition(".")
    if parent:
        package = _module(parent)
        if package is None or PathFinder.find_spec(name, package.__path__) is None:
            return None
    return import_module(name)


@contextmanager
def replaced(paths: Paths, replacement: Any) -> Iterator[None]:
    """Replaces a place inside, and its imports in all modules of megasnn."""
    holder, name = resolved(paths)
    original = getattr(holder, name)
    holders = [holder]
    if holder in sys.modules.values():
        ours = [module for key, module in sys.modules.items() if key.startswith("megasnn.") and module is not holder]
        holders += [module for module in ours if vars(module).get(name) is original]
    with ExitStack() as stack:
        for each in holders:
            stack.enter_context(mock.patch.object(each, name, replacement))
        yield


@contextmanager
def as_on_gpu(launch: Any) -> Iterator[None]:
    """Inside, megasnn works as on a GPU, and `launch` replaces the start of its Triton kernels."""
    package = import_module(KERNELS)
    for each in pkgutil.iter_modules(package.__path__, f"{KERNELS}."):
        import_module(each.name)  # a module that came later would keep a replacement for good
    with ExitStack() as stack:
        for paths, replacement in _ANSWERS.items():
            stack.enter_context(replaced(paths, replacement))
        stack.enter_context(replaced(LAUNCH, launch))
        yield
