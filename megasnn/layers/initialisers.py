"""Initial values of parameters and buffers: functions that fill a global tensor from a generator keyed by its name."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from megasnn.parallel.sharding import Initialiser


def zeros(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.zero_()


def ones(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.fill_(1)


def constant(value: float) -> Initialiser:
    """The same value everywhere."""
    return partial(_constant, value)


def uniform(fan_in: int) -> Initialiser:
    """Uniform within +-1 / sqrt(fan_in): what torch gives weights and biases of convolutions and linear layers."""
    return partial(_uniform, 1 / math.sqrt(fan_in))


def trunc_normal(tensor: Tensor, generator: torch.Generator) -> None:
    """Normal with standard deviation 0.02, cut at +-2: what vision transformers start from."""
    nn.init.trunc_normal_(tensor, std=0.02, generator=generator)


def kaiming_normal(tensor: Tensor, generator: torch.Generator) -> None:
    """Normal with variance 2 / fan_out: what ResNets and VGGs start from (arXiv 1502.01852)."""
    nn.init.kaiming_normal_(tensor, mode="fan_out", nonlinearity="relu", generator=generator)


def _constant(value: float, tensor: Tensor, generator: torch.Generator) -> None:
    tensor.fill_(value)


def _uniform(bound: float, tensor: Tensor, generator: torch.Generator) -> None:
    tensor.uniform_(-bound, bound, generator=generator)
