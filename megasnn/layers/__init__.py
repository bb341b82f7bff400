"""Sharded layers. Activations `[T, N, C_local, *space]` are cut by channel over ranks.

A layer is any module. `layer.LayerTraits` has the attributes by which it says how ranks may divide it.
"""

from megasnn.layers.apply import apply_layer as apply_layer
from megasnn.layers.attention import SpikeDrivenAttention as SpikeDrivenAttention
from megasnn.layers.attention import SpikingSelfAttention as SpikingSelfAttention
from megasnn.layers.attention import TokenAttention as TokenAttention
from megasnn.layers.blocks import ConvNormNeuron as ConvNormNeuron
from megasnn.layers.blocks import NeuronConvNorm as NeuronConvNorm
from megasnn.layers.blocks import Residual as Residual
from megasnn.layers.blocks import ResidualMLP as ResidualMLP
from megasnn.layers.causal_attention import CausalAttention as CausalAttention
from megasnn.layers.causal_spiking_attention import CausalSpikingAttention as CausalSpikingAttention
from megasnn.layers.context import BuildContext as BuildContext
from megasnn.layers.context import Numerics as Numerics
from megasnn.layers.conv import ParallelConv as ParallelConv
from megasnn.layers.dropout import DropPath as DropPath
from megasnn.layers.dropout import ParallelDropout as ParallelDropout
from megasnn.layers.linear import MeanLinear as MeanLinear
from megasnn.layers.linear import ParallelLinear as ParallelLinear
from megasnn.layers.neuron import NeuronLayer as NeuronLayer
from megasnn.layers.neuron import ParallelIF as ParallelIF
from megasnn.layers.neuron import ParallelLIF as ParallelLIF
from megasnn.layers.neuron import ParallelNeuron as ParallelNeuron
from megasnn.layers.neuron import ParallelPLIF as ParallelPLIF
from megasnn.layers.neuron import SpikingNeuron as SpikingNeuron
from megasnn.layers.norm import ParallelBatchNorm as ParallelBatchNorm
from megasnn.layers.psn import ParallelMaskedPSN as ParallelMaskedPSN
from megasnn.layers.psn import ParallelPSN as ParallelPSN
from megasnn.layers.psn import ParallelSlidingPSN as ParallelSlidingPSN
from megasnn.layers.readout import LeakyReadout as LeakyReadout
from megasnn.layers.recurrent import RecurrentNeuron as RecurrentNeuron
from megasnn.layers.recurrent_neurons import RecurrentAdLIF as RecurrentAdLIF
from megasnn.layers.recurrent_neurons import RecurrentLIF as RecurrentLIF
from megasnn.layers.recurrent_neurons import SymplecticAdLIF as SymplecticAdLIF
from megasnn.layers.row_context import MaxPool as MaxPool
from megasnn.layers.row_context import MeanOverSpace as MeanOverSpace
from megasnn.layers.row_context import WholeImages as WholeImages
