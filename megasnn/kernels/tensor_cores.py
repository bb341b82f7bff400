"""Permission for a GPU to round the operands of float32 products to TF32, which its tensor cores multiply.

TF32 has the exponents of float32 and 11 significant bits. Of itself torch rounds in convolutions (cuDNN) and not in
products of matrices (cuBLAS): both are set here, and always in the same way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CAPABILITY = (8, 0)
"""From which compute capability on a GPU's tensor cores take TF32."""

# Modules whose settings are unknown to type checkers.
CUDNN: Any = torch.backends.cudnn
CUBLAS: Any = torch.backends.cuda.matmul
OPERATIONS = CUDNN.conv, CUDNN.rnn, CUBLAS


def takes_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY


def on_gpu(values: Tensor) -> bool:
    return values.is_cuda


def let_products_round(allowed: bool) -> None:
    """For the process. torch.compile reads the first two settings, and fails where they contradict the others."""
    CUDNN.allow_tf32 = CUBLAS.allow_tf32 = allowed
    for operation in OPERATIONS:
        operation.fp32_precision = "tf32" if allowed else "ieee"
