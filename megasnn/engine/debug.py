"""Place of the first value in a step that is not finite."""

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


def first_non_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Returns the name of the first tensor that holds nan or an infinity, and how many; None when all are finite."""
    for name, tensor in named:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            nan, infinite = int(torch.isnan(tensor).sum()), int(torch.isinf(tensor).sum())
            return f"{name}: {nan} nan and {infinite} infinite of {tensor.numel()} values"
    return None


def first_place(distributed: DistributedModel, micro_batches: Sequence[MicroBatchInput]) -> str | None:
    """Returns the layer whose output was not finite first in the step before, otherwise the gradient; None where all
    are finite. The same on every rank.

    The forward is run again; nothing that training keeps is touched. Collective over the world.
    """
    # All modules are watched: a neuron hides nan, since nan reaches no threshold.
    places = {
        module: (index, path)
        for index, chunk in reversed(distributed.chunks.items())  # a module that is called twice has its first place
        for name, layer in reversed([*chunk.named_layers()])
        for path, module in layer.named_modules(prefix=name)
    }
    outputs: list[tuple[int, int, str]] = []

    def check(module: nn.Module, inputs: Any, output: Any) -> None:
        if module not in places:
            return
        index, path = places[module]
        tensors = [(path, leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if (found := first_non_finite(tensors)) is not None:
            outputs.append((index, len(outputs), found))

    hook = register_module_forward_hook(check)
    try:
        distributed.run_again(micro_batches)
    finally:
        hook.remove()
    outputs.sort()  # the lowest chunk first, whatever micro-batch came first
    gradients: list[tuple[int, int, str]] = []
    for index, chunk in reversed(distributed.chunks.items()):
        entries = reversed(chunk.sharded_tensors())
        of_chunk = ((each.name, distributed.gradient_buckets.gradient(each.tensor)) for each in entries)
        found = first_non_finite((name, gradient) for name, gradient in of_chunk if gradient is not None)
        gradients += [(-index, 0, found)] if found else []
    for what, mine in (("forward, first in", outputs), ("backward, first in the gradient of", gradients)):
        if of_ranks := [each for held in gather(distributed.state.world.handle, mine[:1]) for each in held]:
            return f"not finite in {what} {min(of_ranks)[2]}; the step is skipped"
    return None
