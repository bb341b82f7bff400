"""A model before it exists: a list of layer descriptions. A rank calls `build` on those of its own chunks only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from megasnn.comm.codec import Wire
from megasnn.layers.context import BuildContext


@dataclass(frozen=True)
class LayerDescription:
    """
    Attributes:
        name: global name, the prefix of its parameters' names.
        unit: the coarser part that it belongs to ("patch_embed", "blocks.0", "head"), for explicit layouts.
        build: makes the layer with parameters on the meta device.
        output: what the layer's output is known to hold, which decides how it crosses to another stage.
    """

    name: str
    unit: str
    build: Callable[[BuildContext], nn.Module]
    output: Wire


@dataclass(frozen=True)
class ModelDescription:
    """
    Attributes:
        layers: from input to logits; each takes and returns one tensor.
        time_steps: T.
        input_shape: of one sample, (C, H, W) for images and (T, C, H, W) for event frames.
        num_classes: size of the logits `[T, N, num_classes]`.
    """

    layers: tuple[LayerDescription, ...]
    time_steps: int
    input_shape: tuple[int, ...]
    num_classes: int
