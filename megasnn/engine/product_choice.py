"""How a run forms products with spikes: which are split for tensor cores (`--fp32-products`), and which are sums over
the spikes (`--sparse-products`)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from megasnn.comm.agreement import decided_by_first
from megasnn.config.training import TrainingConfig
from megasnn.kernels.compared_products import Comparisons, chosen, compare
from megasnn.kernels.products import KINDS, LayerShape, ProductChoice, products_on_cpu
from megasnn.kernels.tensor_cores import takes_tf32
from megasnn.layers import BuildContext
from megasnn.models.description import ModelDescription
from megasnn.parallel_state import ParallelState
from megasnn.precisions import PRECISIONS


def choose_products(
    training: TrainingConfig, model: ModelDescription, context: BuildContext, state: ParallelState
) -> ProductChoice:
    """How the products of a model's layers are formed. Collective: what the first rank measures holds for all.

    Args:
        context: that the layers are built for.
    """
    types = PRECISIONS[training.precision]
    if not _computes_on_gpu(state) and training.fp32_products != "split":
        return products_on_cpu(training.sparse_products == "auto", getattr(torch, types.products))
    if types.products != "float32" or types.rounds or training.fp32_products == "ieee":
        return ProductChoice()
    if training.fp32_products == "split":
        return ProductChoice(
            frozenset(KINDS),
            told=("fp32 products: all of layers that take spikes or counts are split for tensor cores",),
        )
    if training.deterministic:
        return ProductChoice(told=("fp32 products: none is split, since --deterministic leaves no choice to times",))
    asked = ProductChoice()
    model.build(replace(context, products=asked))
    measure = partial(compare_all, asked.shapes, context.largest_share(training.micro_batch_size), state.device)
    comparisons = decided_by_first(state.world, measure)
    return chosen(comparisons) if comparisons else ProductChoice()


def _computes_on_gpu(state: ParallelState) -> bool:
    return state.device.type == "cuda"


def compare_all(shapes: tuple[LayerShape, ...], samples: int, device: torch.device) -> Comparisons:
    """Every product of every shape, with so many samples; none where the device has no tensor cores for them."""
    if not takes_tf32(device):
        return {}
    found = {(shape, kind): compare(shape, kind, samples, device) for shape in shapes for kind in KINDS}
    torch.cuda.empty_cache()
    return found
