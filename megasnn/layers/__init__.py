"""Natively sharded layers. Activations are `[T, N, C_local, *space]`, cut by channel over the tensor-parallel group."""

from megasnn.layers.attention import SpikeDrivenAttention as SpikeDrivenAttention
from megasnn.layers.attention import SpikingSelfAttention as SpikingSelfAttention
from megasnn.layers.attention import TokenAttention as TokenAttention
from megasnn.layers.blocks import ConvNormNeuron as ConvNormNeuron
from megasnn.layers.blocks import NeuronConvNorm as NeuronConvNorm
from megasnn.layers.blocks import Residual as Residual
from megasnn.layers.blocks import ResidualMLP as ResidualMLP
from megasnn.layers.context import BuildContext as BuildContext
from megasnn.layers.conv import ParallelConv as ParallelConv
from megasnn.layers.dropout import DropPath as DropPath
from megasnn.layers.dropout import ParallelDropout as ParallelDropout
from megasnn.layers.neuron import NeuronLayer as NeuronLayer
from megasnn.layers.neuron import ParallelIF as ParallelIF
from megasnn.layers.neuron import ParallelLIF as ParallelLIF
from megasnn.layers.neuron import ParallelNeuron as ParallelNeuron
from megasnn.layers.neuron import ParallelPLIF as ParallelPLIF
from megasnn.layers.neuron import ParallelPSN as ParallelPSN
from megasnn.layers.neuron import ParallelSlidingPSN as ParallelSlidingPSN
from megasnn.layers.neuron import SpikingNeuron as SpikingNeuron
from megasnn.layers.norm import ParallelBatchNorm as ParallelBatchNorm
from megasnn.layers.plain.replicated import apply_layer as apply_layer
from megasnn.layers.row_context import MaxPool as MaxPool
from megasnn.layers.row_context import MeanOverSpace as MeanOverSpace
from megasnn.layers.row_context import WholeImages as WholeImages
from megasnn.layers.weighted import MeanLinear as MeanLinear
from megasnn.layers.weighted import ParallelLinear as ParallelLinear
