"""What every sharded layer needs to know when it is built: passed down, so that no layer reads a global."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megasnn.comm.group import Group, alone
from megasnn.layers.weight_gradients import WeightGradients


@dataclass(frozen=True)
class BuildContext:
    """
    Attributes:
        tensor: the tensor-parallel group the layers are cut over.
        dtype: of parameters, buffers, optimizer state and gradients.
        compute_dtype: of activations and matrix products; bfloat16 with `--precision bf16`, otherwise `dtype`.
        neuron_backend: a name in megasnn.kernels.BACKENDS, or "auto".
        seed: of what layers draw in training (dropout).
        weight_gradients: where the layers leave the second part of their backward; each chunk has its own.
    """

    tensor: Group = field(default_factory=lambda: alone("tensor"))
    dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.float32
    neuron_backend: str = "auto"
    seed: int = 0
    weight_gradients: WeightGradients = field(default_factory=WeightGradients)
