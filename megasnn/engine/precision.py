"""Rounding of products and deterministic algorithms, set in torch for the whole process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megasnn.config.training import TrainingConfig
from megasnn.kernels.tensor_cores import CAPABILITY, CUBLAS, CUDNN, OPERATIONS, let_products_round, takes_tf32
from megasnn.precisions import PRECISIONS

_MKLDNN: Any = torch.backends.mkldnn
_DETERMINISTIC: Any = torch.utils.deterministic
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")
"""With which cuBLAS promises the same bits in every run."""


@dataclass(frozen=True)
class Arithmetic:
    """
    Attributes:
        rounds: whether products of float32 may round their operands to TF32.
        deterministic: see `--deterministic`.
    """

    rounds: bool
    deterministic: bool

    def apply(self) -> None:
        let_products_round(self.rounds)
        # On a CPU too products of float32 are IEEE, whatever torch.set_float32_matmul_precision was told before.
        _MKLDNN.matmul.fp32_precision = _MKLDNN.conv.fp32_precision = "ieee"
        # Parts of a sum in bfloat16 are added in float32.
        CUBLAS.allow_bf16_reduced_precision_reduction = False
        torch.use_deterministic_algorithms(self.deterministic)
        CUDNN.deterministic = self.deterministic
        if self.deterministic:
            CUDNN.benchmark = False
            # torch would fill all new memory, for programs that read what they have not written.
            _DETERMINISTIC.fill_uninitialized_memory = False


def arithmetic_of(training: TrainingConfig) -> Arithmetic:
    return Arithmetic(PRECISIONS[training.precision].rounds, training.deterministic)


def prepare_cublas(training: TrainingConfig) -> None:
    """Sets the environment of `--deterministic`. It is read with the first product on a GPU: so this comes before
    anything else of a run, and in a process that has used a GPU before it changes nothing."""
    if training.deterministic and not torch.cuda.is_initialized():
        os.environ.setdefault(WORKSPACE, WORKSPACES[0])


def require_possible(training: TrainingConfig, device: torch.device) -> None:
    """Raises ValueError for arithmetic that this device does not have."""
    wanted = arithmetic_of(training)
    if wanted.rounds:
        if device.type != "cuda":
            raise ValueError(
                f"--precision tf32 is for GPUs, and this rank computes on a {device.type.upper()}: use --precision fp32"
            )
        if not takes_tf32(device):
            raise ValueError(
                f"--precision tf32 needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or more, and "
                f"{torch.cuda.get_device_name(device)} has no tensor cores for it: use --precision fp32"
            )
    if wanted.deterministic and device.type == "cuda":
        _require_workspace()


def _require_workspace() -> None:
    workspace = os.environ.get(WORKSPACE)
    if workspace is None and torch.cuda.is_initialized():
        raise ValueError(
            f"--deterministic in a process that has used a GPU before: cuBLAS may have read its environment already, "
            f"and it has no {WORKSPACE}; set {WORKSPACE}={WORKSPACES[0]} before the process starts"
        )
    if workspace is not None and workspace not in WORKSPACES:
        raise ValueError(
            f"--deterministic with {WORKSPACE}={workspace} in the environment: cuBLAS gives the same bits in every run "
            f"with {' or '.join(WORKSPACES)} only; set one of them, or unset it"
        )


def told_torch(training: TrainingConfig, device: torch.device) -> list[str]:
    """For the log: what a run's arithmetic is where there is a choice."""
    wanted, lines = arithmetic_of(training), []
    if device.type == "cuda":
        products = (
            "products of fp32 round their operands to 11 bits: TF32 is on in cuDNN and cuBLAS"
            if wanted.rounds
            else "products of fp32 are IEEE: TF32 is off in cuDNN and cuBLAS"
        )
        algorithms = "deterministic algorithms only" if wanted.deterministic else "algorithms of its own choice"
        lines.append(
            f"{products}; sums of bf16 products are taken in fp32; cuDNN: channels last, {algorithms}, benchmark "
            f"{'on' if CUDNN.benchmark else 'off'}"
        )
    return lines


def set_precision(training: TrainingConfig, device: torch.device) -> Callable[[], None]:
    """Sets torch up for a run; the returned function puts back what was set before.

    Raises:
        ValueError: this device does not have such arithmetic.
    """
    require_possible(training, device)
    restore = _restorer()
    arithmetic_of(training).apply()
    return restore


def _restorer() -> Callable[[], None]:
    """Puts the settings back that there are now."""
    operations = *OPERATIONS, _MKLDNN.matmul, _MKLDNN.conv
    precisions = [each.fp32_precision for each in operations]
    bf16, fill = CUBLAS.allow_bf16_reduced_precision_reduction, _DETERMINISTIC.fill_uninitialized_memory
    algorithms = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    own = CUDNN.deterministic, CUDNN.benchmark

    def restore() -> None:
        let_products_round(precisions[0] == "tf32")
        for operation, precision in zip(operations, precisions, strict=True):
            operation.fp32_precision = precision
        CUBLAS.allow_bf16_reduced_precision_reduction = bf16
        torch.use_deterministic_algorithms(algorithms[0], warn_only=algorithms[1])
        _DETERMINISTIC.fill_uninitialized_memory = fill
        CUDNN.deterministic, CUDNN.benchmark = own

    return restore
