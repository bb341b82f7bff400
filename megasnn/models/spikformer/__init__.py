"""Spikformer: its dimensions, its layers, and its names in other programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megasnn.models.entry import ModelEntry
from megasnn.models.spikformer.dimensions import PretrainSpikformerConfig, SpikformerConfig

if TYPE_CHECKING:
    from torch import Tensor

    from megasnn.kernels import NeuronSpec
    from megasnn.models.description import ModelDescription
    from megasnn.models.names import Dialect


class _Spikformer(ModelEntry[SpikformerConfig]):
    name = "spikformer"
    config = PretrainSpikformerConfig
    marker = "patch_embed.stages.0.conv.weight"

    def describe(self, dimensions: SpikformerConfig, neuron: NeuronSpec) -> ModelDescription:
        from megasnn.models.spikformer.model import describe_spikformer

        return describe_spikformer(dimensions, neuron)

    def dialects(self) -> Sequence[Dialect]:
        from megasnn.models.spikformer.published_names import EITHER, published
        from megasnn.models.spikformer.spikingjelly_names import SPIKINGJELLY

        return SPIKINGJELLY, EITHER, published("cifar10"), published("imagenet")

    def from_spikingjelly(self, dimensions: SpikformerConfig, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        from megasnn.models.spikformer.spikingjelly_names import from_spikingjelly

        return from_spikingjelly(state_dict, dimensions.depth)


ENTRY = _Spikformer()
