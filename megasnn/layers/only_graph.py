"""Layers whose forward is computed again for its graph alone: nothing that it came to is wanted a second time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from megasnn.layers.batch_norm import ParallelBatchNorm
from megasnn.layers.neuron import NeuronLayer
from megasnn.layers.unit import ConvNormNeuron


@contextmanager
def only_graph(layers: Sequence[nn.Module], keeps_output: bool = False) -> Iterator[None]:
    """Inside, norms do not record, nobody is told of spikes, and those that only leave the last of the layers are not
    computed.

    Args:
        keeps_output: whether the output of the last one is wanted nevertheless.
    Raises:
        ValueError: behind a forward that has changed a buffer.
    """
    modules = [module for layer in layers for module in layer.modules()]
    buffers = [(name, b, b._version) for layer in layers for name, b in layer.named_buffers()]
    last = None if keeps_output or not layers else layers[-1]
    with ExitStack() as changes:
        for module in modules:
            if isinstance(module, ParallelBatchNorm):
                changes.enter_context(_set(module, "recording", False))
            elif isinstance(module, NeuronLayer):
                changes.enter_context(_set(module, "observer", None))
        if isinstance(last, ConvNormNeuron) and type(last).forward is ConvNormNeuron.forward:
            changes.enter_context(_set(last, "fires", False))
        yield
    if changed := [name for name, buffer, version in buffers if buffer._version != version]:
        raise ValueError(
            f"its forward changes the buffer {', '.join(changed)}, and would change it twice when it is computed "
            "again: use --recompute never"
        )


@contextmanager
def _set(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
