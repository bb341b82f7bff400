"""Natively sharded layers. Activations are `[T, N, C_local, *space]`, cut by channel over the tensor-parallel group."""

from megasnn.layers.attention import SpikeDrivenAttention, SpikingSelfAttention, TokenAttention
from megasnn.layers.blocks import ConvNormNeuron, NeuronConvNorm, Residual, ResidualMLP
from megasnn.layers.context import BuildContext
from megasnn.layers.conv import ParallelConv
from megasnn.layers.dropout import DropPath, ParallelDropout
from megasnn.layers.linear import MeanLinear, ParallelLinear
from megasnn.layers.neuron import (
    NeuronLayer,
    ParallelIF,
    ParallelLIF,
    ParallelNeuron,
    ParallelPLIF,
    SpikingNeuron,
)
from megasnn.layers.norm import ParallelBatchNorm
from megasnn.layers.parallel_neurons import ParallelPSN, ParallelSlidingPSN
from megasnn.layers.replicated import apply_layer
from megasnn.layers.row_context import MaxPool, MeanOverSpace, WholeImages

__all__ = [
    "BuildContext",
    "ConvNormNeuron",
    "DropPath",
    "MaxPool",
    "MeanLinear",
    "MeanOverSpace",
    "NeuronConvNorm",
    "NeuronLayer",
    "ParallelBatchNorm",
    "ParallelConv",
    "ParallelDropout",
    "ParallelLinear",
    "ParallelIF",
    "ParallelLIF",
    "ParallelNeuron",
    "ParallelPLIF",
    "ParallelPSN",
    "ParallelSlidingPSN",
    "Residual",
    "ResidualMLP",
    "SpikeDrivenAttention",
    "SpikingNeuron",
    "SpikingSelfAttention",
    "TokenAttention",
    "WholeImages",
    "apply_layer",
]
