"""Natively sharded layers. Activations are `[T, N, C_local, *space]`, cut by channel over the tensor-parallel group."""

from megasnn.layers.attention import SpikingSelfAttention
from megasnn.layers.batch_norm import ParallelBatchNorm
from megasnn.layers.context import BuildContext
from megasnn.layers.conv import ParallelConv
from megasnn.layers.drop_path import DropPath
from megasnn.layers.dropout import ParallelDropout
from megasnn.layers.keyed import KeyedLayer, apply_layer
from megasnn.layers.linear import ParallelLinear
from megasnn.layers.neuron import ParallelIF, ParallelLIF, ParallelNeuron, ParallelPLIF
from megasnn.layers.unit import ConvNormNeuron

__all__ = [
    "BuildContext",
    "ConvNormNeuron",
    "DropPath",
    "KeyedLayer",
    "ParallelBatchNorm",
    "ParallelConv",
    "ParallelDropout",
    "ParallelIF",
    "ParallelLIF",
    "ParallelLinear",
    "ParallelNeuron",
    "ParallelPLIF",
    "SpikingSelfAttention",
    "apply_layer",
]
