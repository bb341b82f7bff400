"""Places of what went wrong in a step: values that are not finite, and parameters without a gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megasnn.engine.model import DistributedModel
from megasnn.parallel.agreement import gather
from megasnn.pipeline.chunk import PipelineChunk
from megasnn.pipeline.microbatch_state import MicroBatchInput

_NAMES_IN_NOTICE = 8


@dataclass(frozen=True)
class NonFinite:
    """A tensor with values that are not finite: how many nan and how many infinite among `total`."""

    name: str
    nan: int
    infinite: int
    total: int

    def __str__(self) -> str:
        return f"{self.name}: {self.nan} nan and {self.infinite} infinite of {self.total} values"


def first_non_finite(named: Iterable[tuple[str, Tensor]]) -> NonFinite | None:
    """Returns the first of the named tensors that holds nan or an infinity; None when all are finite."""
    for name, tensor in named:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return NonFinite(name, int(torch.isnan(tensor).sum()), int(torch.isinf(tensor).sum()), tensor.numel())
    return None


@contextmanager
def watched_outputs(modules: Sequence[tuple[str, nn.Module]]) -> Iterator[list[NonFinite]]:
    """Collects the outputs of named modules that are not finite, in the order in which they appear. Each check waits
    for the device."""
    found: list[NonFinite] = []

    def check(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if (wrong := first_non_finite((name, tensor) for tensor in _tensors(output))) is not None:
            found.append(wrong)

    hooks = [module.register_forward_hook(partial(check, name)) for name, module in modules]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def first_place(model: DistributedModel, micro_batches: Sequence[MicroBatchInput]) -> str | None:
    """Returns the layer whose output was not finite first in the step before, otherwise the gradient; None where all
    are finite. The same on every rank.

    The forward is run again; nothing that training keeps is touched. Collective over the world.
    """
    leaves = [(index, leaf) for index, chunk in model.chunks.items() for leaf in _leaves(chunk)]
    order = {name: index for index, (name, _) in leaves}
    with watched_outputs([leaf for _, leaf in leaves]) as found:
        model.run_again(micro_batches)
    outputs = [((order[each.name], number), each) for number, each in enumerate(found)]
    outputs.sort(key=lambda pair: pair[0])  # the lowest chunk first, whatever micro-batch came first
    for what, mine in (("forward, first in", outputs), ("backward, first in the gradient of", _gradients(model))):
        of_ranks = [each for held in gather(model.state.world.handle, mine[:1]) for each in held]
        if of_ranks:
            return f"not finite in {what} {min(of_ranks, key=lambda each: each[0])[1]}; the step is skipped"
    return None


def _gradients(model: DistributedModel) -> list[tuple[tuple[int, int], NonFinite]]:
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


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yields the tensors of a module's output: a tensor, or tuples, lists and mappings of them."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | tuple | list):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(value)


def names_without_gradient(model: DistributedModel) -> list[str]:
    """Returns the trained parameters to which no backward has added anything yet, on any rank. Collective.

    A gradient of zeros is one: of a layer whose neurons are silent, and of one before a chunk without a derivative.
    """
    missing = model.data_parallel.without_gradient
    here = {
        entry.name: entry.tensor in missing
        for chunk in model.chunks.values()
        for entry in (*chunk.copied_tensors(), *chunk.sharded_tensors())
        if entry.is_parameter and entry.tensor.requires_grad
    }
    of_ranks = gather(model.state.world.handle, here)
    learning = {name for each in of_ranks for name, is_missing in each.items() if not is_missing}
    silent = {name for each in of_ranks for name in each} - learning
    return [entry.name for entry in model.described if entry.name in silent]


def notice_of(names: Sequence[str]) -> str:
    """Formats `names_without_gradient` for the user."""
    more = f" and {len(names) - _NAMES_IN_NOTICE} more" if len(names) > _NAMES_IN_NOTICE else ""
    return (
        f"no gradient in the first step, so that nothing but weight decay changes them: "
        f"{', '.join(names[:_NAMES_IN_NOTICE])}{more}. The loss does not depend on these parameters, or something "
        "without a derivative lies between"
    )
