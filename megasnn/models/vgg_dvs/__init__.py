"""The VGG for event cameras: its dimensions, its layers, and its names in other programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megasnn.models.entry import ModelEntry
from megasnn.models.vgg_dvs.dimensions import PretrainVggDvsConfig, VggDvsConfig

if TYPE_CHECKING:
    from torch import Tensor

    from megasnn.kernels import NeuronSpec
    from megasnn.models.description import ModelDescription
    from megasnn.models.names import Dialect


class _VggDvs(ModelEntry[VggDvsConfig]):
    name = "vgg_dvs"
    config = PretrainVggDvsConfig
    marker = "classifier.linear.weight"

    def describe(self, dimensions: VggDvsConfig, neuron: NeuronSpec) -> ModelDescription:
        from megasnn.models.vgg_dvs.model import describe_vgg_dvs

        return describe_vgg_dvs(dimensions, neuron)

    def dialects(self) -> Sequence[Dialect]:
        from megasnn.models.vgg_dvs.spikingjelly_names import SPIKINGJELLY

        return (SPIKINGJELLY,)

    def from_spikingjelly(self, dimensions: VggDvsConfig, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        from megasnn.models.vgg_dvs.spikingjelly_names import vgg_from_spikingjelly

        return vgg_from_spikingjelly(state_dict, [block.pool for block in dimensions.blocks])


ENTRY = _VggDvs()
