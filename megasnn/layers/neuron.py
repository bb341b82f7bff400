"""Spiking neurons over the local channels, with SpikingJelly's semantics in multi-step mode."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from megasnn.kernels import NeuronSpec, neuron_multi_step
from megasnn.layers.context import BuildContext
from megasnn.sharding import declare_parameter

SpikeObserver = Callable[[Tensor], None]


class ParallelNeuron(nn.Module):
    """The common part of ParallelLIF, ParallelIF and ParallelPLIF: `[T, N, C_local, *space]` in, spikes out.

    A neuron depends on its own channel only, so that nothing is communicated. Every call starts from the resting
    potential, unless `carry_over` keeps the last potential for the next call (truncated backpropagation through time);
    the potential is held for the local channels only, without its history in the graph, and `reset` forgets it.

    Attributes:
        spec: what the neuron computes.
        v: the potential `[N, C_local, *space]` after the last step, with `carry_over`; otherwise None.
        observer: called with the spikes of every forward when set (spike statistics).
    Raises:
        ValueError: the description is of another kind of neuron.
    """

    kind: str

    def __init__(self, spec: NeuronSpec, context: BuildContext, *, carry_over: bool = False) -> None:
        super().__init__()
        if spec.kind != self.kind:
            name = type(self).__name__
            raise ValueError(f"{name} is a neuron of kind {self.kind!r}, the description says {spec.kind!r}")
        self.spec, self.backend, self.carry_over = spec, context.neuron_backend, carry_over
        self.v: Tensor | None = None
        self.observer: SpikeObserver | None = None

    @property
    def time_constant(self) -> Tensor | None:
        """The learned time constant's parameter, for neurons that have one."""
        return None

    def forward(self, x: Tensor) -> Tensor:
        spikes, v = neuron_multi_step(x, self.spec, self.v, self.time_constant, self.backend)
        if self.carry_over:
            self.v = v.detach()
        return self.observed(spikes)

    def observed(self, spikes: Tensor) -> Tensor:
        if self.observer is not None:
            self.observer(spikes.detach())
        return spikes

    def reset(self) -> None:
        self.v = None

    def extra_repr(self) -> str:
        return str(self.spec)


class ParallelLIF(ParallelNeuron):
    """Leaky integrate-and-fire (SpikingJelly's LIFNode)."""

    kind = "lif"


class ParallelIF(ParallelNeuron):
    """Integrate-and-fire without leak (SpikingJelly's IFNode)."""

    kind = "if"


class ParallelPLIF(ParallelNeuron):
    """LIF with a learned time constant 1 / sigmoid(w), one for the layer (arXiv 2007.05785; ParametricLIFNode).

    Every rank holds `w` whole and sees the gradient of its own channels: `partial_gradient` has it summed.
    """

    kind = "plif"
    w: Tensor

    def __init__(self, spec: NeuronSpec, context: BuildContext, *, carry_over: bool = False) -> None:
        super().__init__(spec, context, carry_over=carry_over)
        start = -math.log(spec.tau - 1.0)

        def fill(tensor: Tensor, generator: torch.Generator) -> None:
            tensor.fill_(start)

        declare_parameter(self, "w", context.shard((), partial_gradient=True, initialise=fill), context.dtype)

    @property
    def time_constant(self) -> Tensor:
        return self.w


NEURONS: dict[str, type[ParallelNeuron]] = {cls.kind: cls for cls in (ParallelLIF, ParallelIF, ParallelPLIF)}


def build_neuron(spec: NeuronSpec, context: BuildContext) -> ParallelNeuron:
    """The layer for a description."""
    return NEURONS[spec.kind](spec, context)
