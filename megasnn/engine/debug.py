"""Place of the first value in a step that is not finite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megasnn.engine.model import DistributedModel
from megasnn.parallel.agreement import gather
from megasnn.pipeline.chunk import PipelineChunk
from megasnn.pipeline.microbatch_state import MicroBatchInput


def first_non_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Returns the name of the first tensor that holds nan or an infinity, and how many; None when all are finite. Each
    check waits for the device."""
    for name, tensor in named:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            nan, infinite = int(torch.isnan(tensor).sum()), int(torch.isinf(tensor).sum())
            return f"{name}: {nan} nan and {infinite} infinite of {tensor.numel()} values"
    return None


def first_place(model: DistributedModel, micro_batches: Sequence[MicroBatchInput]) -> str | None:
    """Returns the layer whose output was not finite first in the step before, otherwise the gradient; None where all
    are finite. The same on every rank.

    The forward is run again; nothing that training keeps is touched. Collective over the world.
    """
    leaves = [(index, *leaf) for index, chunk in model.chunks.items() for leaf in _leaves(chunk)]
    outputs: list[tuple[tuple[int, int], str]] = []

    def check(index: int, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        tensors = [(name, leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if (found := first_non_finite(tensors)) is not None:
            outputs.append(((index, len(outputs)), found))

    hooks = [module.register_forward_hook(partial(check, index, name)) for index, name, module in leaves]
    try:
        model.run_again(micro_batches)
    finally:
        for hook in hooks:
            hook.remove()
    outputs.sort()  # the lowest chunk first, whatever micro-batch came first
    for what, mine in (("forward, first in", outputs), ("backward, first in the gradient of", _gradients(model))):
        if of_ranks := [each for held in gather(model.state.world.handle, mine[:1]) for each in held]:
            return f"not finite in {what} {min(of_ranks)[1]}; the step is skipped"
    return None


def _gradients(model: DistributedModel) -> list[tuple[tuple[int, int], str]]:
    """This rank's first gradient that is not finite in the order of backward, and its place in that."""
    for index, chunk in reversed(model.chunks.items()):
        for number, entry in enumerate(reversed(chunk.sharded_tensors())):
            gradient = model.data_parallel.gradient(entry.tensor)
            if gradient is not None and (found := first_non_finite([(entry.name, gradient)])) is not None:
                return [((-index, number), found)]
    return []


def _leaves(chunk: PipelineChunk) -> list[tuple[str, nn.Module]]:
    """(global name, module) below a chunk, innermost first: the order in which outputs appear. A neuron hides nan,
    since nan reaches no threshold, so what comes before neurons is watched too."""
    return [
        (path, module)
        for name, layer in chunk.named_layers()
        for path, module in sorted(layer.named_modules(prefix=name), key=lambda pair: -pair[0].count("."))
    ]
