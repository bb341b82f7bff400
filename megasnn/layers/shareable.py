"""Which layers can be computed where ranks share a micro-batch, by its samples or by rows of its images.

A module says what it mixes by attributes of its class: `mixes_samples = True` where a sample's output depends on other
samples, `mixes_rows = False` where a row of the output depends on the same row of the input alone. MegaSNN's layers
exchange what they need.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megasnn.layers.context import BuildContext
from megasnn.layers.neuron import NeuronLayer

SURROGATES = "spikingjelly.activation_based.surrogate"
"""Where the classes of its surrogate functions are, which neurons of one's own have in them."""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_ELEMENTWISE_MODULES = (
    *(nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Hardtanh, nn.LeakyReLU, nn.ELU, nn.Softplus),
)
ELEMENTWISE = {torch.add, torch.mul, torch.sub, torch.maximum, torch.minimum, operator.add, operator.mul, operator.sub}


def refuse_unshareable(module: nn.Module, context: BuildContext) -> None:
    """Raises ValueError for a layer, or a module in it, that mixes what ranks share out, or does not say that it does
    not."""
    if context.context.size == 1:
        return
    is_torchs = all(type(each).__module__.startswith("torch.nn.") for each in module.modules())
    for path, each in module.named_modules():
        what = f"{path} ({type(each).__name__})" if path else type(each).__name__
        asked = f"--context-parallel-size {context.context.size}"
        # A layer of torch's is given [T, N, C], and would take the time for the batch.
        takes_time_for_batch = is_torchs and getattr(each, "batch_first", False) is True
        if context.cut == "samples" and (getattr(each, "mixes_samples", False) or takes_time_for_batch):
            reason = "batch_first=True" if takes_time_for_batch else "mixes_samples"
            raise ValueError(f"{what} mixes samples ({reason}): it cannot be computed with {asked} by samples")
        if context.cut == "rows" and mixes_rows(each):
            raise ValueError(
                f"{what} mixes rows of images, or does not say that it computes each by itself (mixes_rows = False in "
                f"its class): it cannot be computed with {asked} by rows; use --context-parallel-cut samples"
            )


@contextmanager
def one_height(layer: nn.Module) -> Iterator[None]:
    """Inside, a layer is run on whole images. Raises ValueError where it calls a module that moves rows with images of
    two heights, since the module knows for one of them which rows move."""
    heights: dict[nn.Module, tuple[int, ...]] = {}

    def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        height = inputs[0].shape[3:4]
        if (first := heights.setdefault(module, height)) != height:
            raise ValueError(
                f"this {type(module).__name__} is called with images of {first[0]} rows and of {height[0]}, which with "
                "--context-parallel-cut rows needs a module for each"
            )

    moving = [each for each in layer.modules() if vars(each).get("_rows") is not None]
    noted = [each.register_forward_pre_hook(note) for each in moving]
    try:
        yield
    finally:
        for each in noted:
            each.remove()


def mixes_rows(module: nn.Module) -> bool:
    """Whether a module, without those in it, needs rows that other ranks may have and does not get them itself."""
    said = getattr(module, "mixes_rows", None)
    if said is not None:
        return bool(said)
    ours = type(module).__module__.startswith(("megasnn.", SURROGATES))
    return not (ours or type(module) in (*_CONTAINERS, *_ELEMENTWISE_MODULES) or isinstance(module, NeuronLayer))
