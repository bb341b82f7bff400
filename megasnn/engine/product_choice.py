"""How a run forms products with spikes: on a CPU as sums over the spikes (`--sparse-products`)."""

from __future__ import annotations

import torch

from megasnn.config.training import TrainingConfig
from megasnn.kernels.products import ProductChoice, products_on_cpu
from megasnn.parallel_state import ParallelState
from megasnn.precisions import PRECISIONS


def choose_products(training: TrainingConfig, state: ParallelState) -> ProductChoice:
    """How the products of a model's layers are formed."""
    if state.device.type == "cuda":
        return ProductChoice()
    return products_on_cpu(training.sparse_products == "auto", getattr(torch, PRECISIONS[training.precision].products))
