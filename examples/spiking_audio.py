"""Recurrent network for spiking audio (SHD, SSC), from HDF5 files to a trained network.

    python tools/preprocess_data.py shd --input SHD --output SHARDS --time-steps 100
    python examples/spiking_audio.py --config recurrent_audio/shd_radlif --data-path "SHARDS/train-*.tar" \
        --valid-data-path "SHARDS/val-*.tar"

It also runs under torchrun, in any layout. The recipes are in examples/recipes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import megasnn
from megasnn import ArraySpec, ParallelBatchNorm, ParallelDropout, ParallelLinear, layer
from megasnn.layers import LeakyReadout, RecurrentAdLIF, RecurrentLIF, SymplecticAdLIF
from megasnn.layers.init import zeros
from megasnn.layers.layer import Layer

CELLS = {"rlif": RecurrentLIF, "radlif": RecurrentAdLIF, "se_adlif": SymplecticAdLIF}


@dataclass(frozen=True, kw_only=True)
class RecurrentAudio(megasnn.Model):
    """Layers of recurrent spiking neurons, and leaky integrators as classes."""

    in_channels: int = 700
    """Channels of the frames, as preprocessed."""
    time_steps: int = 100
    """Frames of a sample, as preprocessed."""
    num_classes: int = 20
    """Number of classes: 20 in SHD, 35 in SSC."""
    width: int = 128
    """Neurons of a layer."""
    depth: int = 2
    """Number of recurrent layers."""
    cell: Literal["rlif", "radlif", "se_adlif"] = "radlif"
    """Neuron: RLIF, RadLIF (Bittar and Garner 2022) or SE-adLIF (arXiv 2408.07517)."""
    norm: bool = True
    """Batch norm before the neurons, as with RLIF and RadLIF; SE-adLIF has none."""
    dropout: float = 0.1
    """Probability to drop a spike in training."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.time_steps, self.in_channels

    @property
    def inputs(self) -> Mapping[str, ArraySpec]:
        return {"spikes": ArraySpec(self.input_shape, over_time=True, file="npy")}

    def layers(self) -> Iterable[Layer]:
        inputs = self.in_channels
        for index in range(self.depth):
            linear = ParallelLinear(inputs, self.width, style="column", bias=not self.norm, initialise_bias=zeros)
            yield layer(f"linear.{index}", linear)
            if self.norm:
                yield layer(f"norm.{index}", ParallelBatchNorm(self.width, momentum=0.05))
            yield layer(f"neuron.{index}", CELLS[self.cell](self.width))
            yield layer(f"dropout.{index}", ParallelDropout(self.dropout, f"dropout.{index}"))
            inputs = self.width
        yield layer("head", LeakyReadout(self.width, self.num_classes, initialise_bias=zeros))


if __name__ == "__main__":
    megasnn.pretrain(RecurrentAudio)
