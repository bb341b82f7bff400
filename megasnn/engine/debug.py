"""Where a nan or an infinity appeared first in a step, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from torch import nn

from megasnn.engine.model import DistributedModel
from megasnn.non_finite import NonFinite, NonFiniteWatch, earliest, first_non_finite
from megasnn.pipeline.chunk import PipelineChunk
from megasnn.pipeline.step_state import MicroBatchInput


def first_place(model: DistributedModel, micro_batches: Sequence[MicroBatchInput]) -> str | None:
    """In which layer's output of the step before it was, otherwise in which gradient; the same on every rank.

    Nothing that training keeps is touched. Collective over the world.
    """
    world = model.state.world.handle
    chunk, found = _in_outputs(model, micro_batches) or (0, None)
    where = earliest(found, chunk, world)
    if where is not None:
        return f"not finite in forward, first in {where}; the step is skipped"
    # Backward runs from the last chunk to the first.
    place, found = _in_gradients(model) or ((0, 0), None)
    where = earliest(found, place, world)
    return None if where is None else f"not finite in backward, first in the gradient of {where}; the step is skipped"


def _in_outputs(model: DistributedModel, micro_batches: Sequence[MicroBatchInput]) -> tuple[int, NonFinite] | None:
    """The chunk and the output in it that is this rank's first; runs the forward again."""
    with ExitStack() as stack:
        watches = [(c, stack.enter_context(NonFiniteWatch(_leaves(chunk)))) for c, chunk in model.chunks.items()]
        model.run_again(micro_batches)
    return next(((chunk, watch.found) for chunk, watch in watches if watch.found is not None), None)


def _in_gradients(model: DistributedModel) -> tuple[tuple[int, int], NonFinite] | None:
    """This rank's first gradient in the order of backward, and its place in that."""
    for index, chunk in reversed(model.chunks.items()):
        for number, entry in enumerate(reversed(chunk.sharded_tensors())):
            gradient = model.data_parallel.gradient(entry.tensor)
            found = None if gradient is None else first_non_finite([(entry.name, gradient)])
            if found is not None:
                return (-index, number), found
    return None


def _leaves(chunk: PipelineChunk) -> list[tuple[str, nn.Module]]:
    """(global name, module) below a chunk, innermost first: the order in which outputs appear."""
    return [
        (path, module)
        for name, layer in chunk.named_layers()
        for path, module in sorted(layer.named_modules(prefix=name), key=lambda pair: -pair[0].count("."))
    ]
