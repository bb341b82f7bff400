"""The types that a run computes in, by name. The table needs no torch: types have the names that torch gives them."""

from __future__ import annotations

from dataclasses import dataclass

from megasnn.table import Table


@dataclass(frozen=True)
class Precision:
    """
    Attributes:
        summary: for --help.
        weights: type of parameters, buffers, gradients and optimizer state.
        products: type of activations and of matrix products; their gradients cross stages in it.
    """

    summary: str
    weights: str
    products: str


PRECISIONS: Table[Precision] = Table(
    "--precision",
    {
        "fp32": Precision("", "float32", "float32"),
        "bf16": Precision("autocast with fp32 weights", "float32", "bfloat16"),
        "fp64": Precision("for checks", "float64", "float64"),
    },
)
