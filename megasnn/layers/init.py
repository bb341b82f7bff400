"""Initial values: functions that fill a global tensor from a generator keyed by the tensor's name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from megasnn.parallel.sharding import Initialiser

ModuleInitialiser = Callable[[nn.Module, str], object]
"""Sets a module's values. The second argument is its path in the model, as in its tensors' names."""


def below(path: str, initialise: ModuleInitialiser | None) -> ModuleInitialiser | None:
    """The same function for modules inside the one at `path`, called with paths from there on."""
    if initialise is None:
        return None
    return lambda module, inner: initialise(module, f"{path}.{inner}" if inner else path)


def constant(value: float) -> Initialiser:
    return lambda tensor, generator: tensor.fill_(value)


zeros = constant(0)
ones = constant(1)


def uniform(fan_in: int) -> Initialiser:
    """Uniform within +-1 / sqrt(fan_in), torch's default for convolutions and linear layers."""
    bound = 1 / math.sqrt(fan_in)
    return lambda tensor, generator: tensor.uniform_(-bound, bound, generator=generator)


def trunc_normal(tensor: Tensor, generator: torch.Generator) -> None:
    """Normal with standard deviation 0.02, truncated at +-2, as in vision transformers."""
    nn.init.trunc_normal_(tensor, std=0.02, generator=generator)


def kaiming_normal(tensor: Tensor, generator: torch.Generator) -> None:
    """Normal with variance 2 / fan_out, as in ResNets and VGGs (arXiv 1502.01852)."""
    nn.init.kaiming_normal_(tensor, mode="fan_out", nonlinearity="relu", generator=generator)


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Without submodules'."""
    return chain(
        module.named_parameters(recurse=False, remove_duplicate=False),
        module.named_buffers(recurse=False, remove_duplicate=False),
    )
