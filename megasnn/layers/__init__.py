"""Natively sharded layers. Activations are `[T, N, C_local, *space]`, cut by channel over the tensor-parallel group."""

from megasnn.layers.attention import SpikeDrivenAttention, SpikingSelfAttention, TokenAttention
from megasnn.layers.batch_norm import ParallelBatchNorm
from megasnn.layers.context import BuildContext
from megasnn.layers.conv import ParallelConv
from megasnn.layers.dropout import DropPath, ParallelDropout
from megasnn.layers.keyed import KeyedLayer
from megasnn.layers.linear import MeanLinear, ParallelLinear
from megasnn.layers.max_pool import MaxPool
from megasnn.layers.neuron import NeuronLayer, ParallelIF, ParallelLIF, ParallelNeuron, ParallelPLIF
from megasnn.layers.norms import (
    ParallelGroupNorm,
    ParallelLayerNorm,
    TemporalEffectiveBatchNorm,
    ThresholdDependentBatchNorm,
)
from megasnn.layers.own_neuron import SpikingNeuron
from megasnn.layers.unit import ConvNormNeuron, NeuronConvNorm, PooledUnit
from megasnn.layers.whole import apply_layer
from megasnn.layers.whole_images import MeanOverSpace, WholeImages

__all__ = [
    "BuildContext",
    "ConvNormNeuron",
    "DropPath",
    "KeyedLayer",
    "MaxPool",
    "MeanLinear",
    "MeanOverSpace",
    "NeuronConvNorm",
    "NeuronLayer",
    "ParallelBatchNorm",
    "ParallelConv",
    "ParallelDropout",
    "ParallelGroupNorm",
    "ParallelIF",
    "ParallelLIF",
    "ParallelLayerNorm",
    "ParallelLinear",
    "ParallelNeuron",
    "ParallelPLIF",
    "PooledUnit",
    "SpikeDrivenAttention",
    "SpikingNeuron",
    "SpikingSelfAttention",
    "TemporalEffectiveBatchNorm",
    "ThresholdDependentBatchNorm",
    "TokenAttention",
    "WholeImages",
    "apply_layer",
]
