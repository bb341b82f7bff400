"""The types that a run computes in, by name. The table needs no torch: types have the names that torch gives them."""

from __future__ import annotations

from dataclasses import dataclass

from megasnn.registry import Registry


@dataclass(frozen=True)
class Precision:
    """
    Attributes:
        summary: for --help.
        weights: type of parameters, buffers, gradients and optimizer state.
        products: type of activations and of matrix products; their gradients cross stages in it.
        rounds: whether products of float32 may round their operands to TF32, which has 11 significant bits. Only GPUs
            of compute capability 8.0 or more do.
    """

    summary: str
    weights: str
    products: str
    rounds: bool = False


PRECISIONS: Registry[Precision] = Registry(
    "--precision",
    {
        "fp32": Precision("IEEE single precision everywhere, also on GPUs", "float32", "float32"),
        "tf32": Precision("fp32 with products whose operands a GPU rounds to 11 bits", "float32", "float32", True),
        "bf16": Precision("activations and products in bfloat16, weights and sums in fp32", "float32", "bfloat16"),
        "fp64": Precision("for checks", "float64", "float64"),
    },
    refused={
        "fp16": "gradients of float16 vanish without a loss scale, which there is not; use bf16, which takes the same "
        "memory and needs none"
    },
)
