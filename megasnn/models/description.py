"""A model before it exists: its layers' names and what they give, and how they are built for a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from megasnn.comm.codec import Content
from megasnn.layers.context import BuildContext


@dataclass(frozen=True)
class LayerDescription:
    """
    Attributes:
        name: global name, the prefix of its parameters' names.
        unit: the coarser part that it belongs to ("patch_embed", "blocks.0", "head"), for explicit layouts.
        output: what the layer's output is known to hold, which decides how it crosses to another stage.
    """

    name: str
    unit: str
    output: Content


@dataclass(frozen=True)
class ModelDescription:
    """
    Attributes:
        layers: from input to logits; each takes and returns one tensor.
        build: makes all layers for a rank, with parameters on the meta device: without memory. A rank gives memory to
            those of its own chunks only (`megasnn.sharding.materialise`).
        time_steps: T.
        input_shape: of one sample, (C, H, W) for images and (T, C, H, W) for event frames.
        num_classes: size of the logits `[T, N, num_classes]`.
    """

    layers: tuple[LayerDescription, ...]
    build: Callable[[BuildContext], Sequence[nn.Module]]
    time_steps: int
    input_shape: tuple[int, ...]
    num_classes: int

    def named_layers(self, context: BuildContext) -> list[tuple[str, nn.Module]]:
        """All layers for a rank with their names, without memory."""
        return list(zip([layer.name for layer in self.layers], self.build(context), strict=True))


def frames_of(samples: Tensor, input_shape: tuple[int, ...]) -> Tensor:
    """Samples as they are loaded, as the first layer takes them: `[T, N, C, H, W]`, or `[1, N, C, H, W]` for images.

    Args:
        samples: images `[N, C, H, W]` or sequences of them `[T, N, C, H, W]`; frames of events `[N, T, C, H, W]`.
        input_shape: of one sample, as in ModelDescription.
    Raises:
        ValueError: samples of another shape.
    """
    if len(input_shape) == 4:
        if samples.ndim != 5 or tuple(samples.shape[1:]) != input_shape:
            wanted = ", ".join(map(str, input_shape))
            raise ValueError(
                f"expected event frames [N, {wanted}] (N, --time-steps, --in-channels and twice --image-size), got "
                f"shape {list(samples.shape)}"
            )
        return samples.transpose(0, 1)
    if samples.ndim not in (len(input_shape) + 1, len(input_shape) + 2):
        raise ValueError(f"expected images [N, C, H, W] or sequences [T, N, C, H, W], got shape {list(samples.shape)}")
    return samples.unsqueeze(0) if samples.ndim == len(input_shape) + 1 else samples
