"""The first place in a step that is not finite: the layer, or the gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from megasnn.engine.model import DistributedModel
from megasnn.parallel.agreement import gather
from megasnn.pipeline.microbatch_state import MicroBatchInput

Found = tuple[int, int, str]
"""(chunk, order within it, text), the smallest first."""


def first_not_finite(distributed: DistributedModel, micro_batches: Sequence[MicroBatchInput]) -> str | None:
    """Finds the first layer of the last step whose output was not finite, or else the gradient. Collective.

    The forward is run again; nothing that training keeps is touched.

    Returns:
        text with the place, the same on every rank; None where all is finite.
    """
    for place, found in (
        ("forward, first in", _in_forward(distributed, micro_batches)),
        ("backward, first in the gradient of", _in_gradients(distributed)),
    ):
        of_ranks = gather(distributed.state.world.handle, found[:1])
        everywhere = [each for of_rank in of_ranks for each in of_rank]
        if everywhere:
            return f"not finite in {place} {min(everywhere)[2]}; the step is skipped"
    return None


def _in_forward(distributed: DistributedModel, micro_batches: Sequence[MicroBatchInput]) -> list[Found]:
    """Outputs that are not finite when the forward is run again, of the lowest chunk first. Collective."""
    found: list[Found] = []
    paths = _paths(distributed)

    def check(module: nn.Module, inputs: Any, output: Any) -> None:
        if module not in paths:
            return
        index, path = paths[module]
        tensors = [(path, leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        text = first_non_finite(tensors)
        if text is not None:
            found.append((index, len(found), text))

    hook = register_module_forward_hook(check)
    try:
        distributed.run_again(micro_batches)
    finally:
        hook.remove()
    return sorted(found)  # the lowest chunk first, whichever micro-batch came first


def _paths(distributed: DistributedModel) -> dict[nn.Module, tuple[int, str]]:
    """Chunk and name of all modules: a neuron hides nan, which reaches no threshold, so that all are watched."""
    paths = {}
    for index, chunk in reversed([*distributed.chunks.items()]):  # a module that is called twice has its first place
        for name, layer in reversed([*chunk.named_layers()]):
            for path, module in layer.named_modules(prefix=name):
                paths[module] = index, path
    return paths


def _in_gradients(distributed: DistributedModel) -> list[Found]:
    """Gradients that are not finite: one of each chunk, the last layer's first, as backward goes."""
    found: list[Found] = []
    for index, chunk in reversed([*distributed.chunks.items()]):
        gradients = []
        for entry in reversed(chunk.sharded_tensors()):
            gradient = distributed.gradient_buckets.gradient(entry.tensor)
            if gradient is not None:
                gradients.append((entry.name, gradient))
        text = first_non_finite(gradients)
        if text is not None:
            found.append((-index, 0, text))
    return found


def first_non_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Text with the name of the first tensor that holds nan or an infinity, and how many; None when all are finite."""
    for name, tensor in named:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            nan = int(torch.isnan(tensor).sum())
            infinite = int(torch.isinf(tensor).sum())
            return f"{name}: {nan} nan and {infinite} infinite of {tensor.numel()} values"
    return None
