"""Names the first layer or gradient with values that are not finite."""

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
"""(chunk, order within it, text); the smallest is first in the pass."""


def locate_not_finite(distributed: DistributedModel, micro_batches: Sequence[MicroBatchInput]) -> str | None:
    """The last step's first output with nan or infinities, or else the first such gradient. Collective.

    Runs the forward again; training state stays. The same text on every rank; None where all values are finite.
    """
    for where, found in (
        ("forward, first in", _in_forward(distributed, micro_batches)),
        ("backward, first in the gradient of", _in_gradients(distributed)),
    ):
        first_of_ranks: list[Found] = []
        for of_rank in gather(distributed.state.world.handle, found[:1]):
            first_of_ranks += of_rank
        if first_of_ranks:
            _, _, text = min(first_of_ranks)
            return f"not finite in {where} {text}; the step is skipped"
    return None


def _in_forward(distributed: DistributedModel, micro_batches: Sequence[MicroBatchInput]) -> list[Found]:
    """Outputs with nan or infinities, the lowest chunk first. Collective."""
    found: list[Found] = []
    paths = _paths(distributed)

    def check(module: nn.Module, inputs: Any, output: Any) -> None:
        if module not in paths:
            return
        index, path = paths[module]
        tensors = [(path, leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        text = first_not_finite(tensors)
        if text is not None:
            found.append((index, len(found), text))

    hook = register_module_forward_hook(check)
    try:
        distributed.run_again(micro_batches)
    finally:
        hook.remove()
    # A schedule may run a later chunk of one micro-batch before an earlier chunk of the next.
    return sorted(found)


def _paths(distributed: DistributedModel) -> dict[nn.Module, tuple[int, str]]:
    paths = {}
    # In reverse, so that a module in two places gets the first.
    for index, chunk in reversed([*distributed.chunks.items()]):
        for name, layer in reversed([*chunk.named_layers()]):
            # Outer modules do not suffice: nan crosses no threshold, so neurons hide it.
            for path, module in layer.named_modules(prefix=name):
                paths[module] = index, path
    return paths


def _in_gradients(distributed: DistributedModel) -> list[Found]:
    """Each chunk's first gradient with nan or infinities, in backward order."""
    found: list[Found] = []
    for index, chunk in reversed([*distributed.chunks.items()]):
        gradients = []
        for entry in reversed(chunk.sharded_tensors()):
            gradient = distributed.gradient_buckets.gradient(entry.tensor)
            if gradient is not None:
                gradients.append((entry.name, gradient))
        text = first_not_finite(gradients)
        if text is not None:
            # Backward starts in the last chunk, and the smallest number counts as the first.
            found.append((-index, 0, text))
    return found


def first_not_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Names the tensor, and counts such values; None where all are finite."""
    for name, tensor in named:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            nan = int(torch.isnan(tensor).sum())
            infinite = int(torch.isinf(tensor).sum())
            return f"{name}: {nan} nan and {infinite} infinite of {tensor.numel()} values"
    return None
