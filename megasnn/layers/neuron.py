"""Spiking neurons over the local channels, with SpikingJelly's semantics in multi-step mode."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from megasnn.kernels import NEURONS, NeuronSpec
from megasnn.kernels.neuron import neuron_multi_step
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.holding import hold, once
from megasnn.parallel.sharding import declare_parameter

SpikeObserver = Callable[[Tensor], None]


class NeuronLayer(nn.Module):
    """What all layers of neurons have: `[T, N, C_local, *space]` in, spikes out.

    A neuron depends on its own channel only, so that nothing is communicated. Input of a single time step comes at
    each of them.

    Every call starts at rest. Where the context says that neurons carry (truncated backpropagation through time), it
    goes on from the state that the last call left, without its history in the graph, until it is told to forget that.

    Attributes:
        time_steps: T of the model.
        carries: whether it keeps its state for the next call.
        observer: called with the spikes of every forward when set (spike statistics).
        largest: the largest value that a neuron gives, of the whole numbers from 0; None where others come too.
        once_because: why one forward may not call it twice; None where it may, and each call starts at rest.
    """

    largest: int | None = 1
    once_because: str | None = None

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        self.time_steps, self.carries = context.time_steps, context.carries
        self.observer: SpikeObserver | None = None
        if self.carries:
            self.once_because = "with --bptt-steps it goes on from what one call left: give each call a neuron"

    def steps_of(self, x: Tensor) -> int:
        """The number of time steps that the spikes for an input have."""
        return self.time_steps if len(x) == 1 else len(x)

    def at_every_step(self, x: Tensor) -> Tensor:
        """The input at each of the time steps. Raises ValueError in the dry run for a second call that may not be."""
        if x.is_meta and self.once_because is not None:
            once(self, self.once_because)
        steps = self.steps_of(x)
        return x if len(x) == steps else x.expand(steps, *x.shape[1:])

    @abstractmethod
    def forget(self) -> None:
        """Forgets the state that the last call left."""

    @property
    def is_observed(self) -> bool:
        """Whether its spikes are wanted now: an observer may say by `is_on` that it is not looking."""
        return self.observer is not None and bool(getattr(self.observer, "is_on", True))

    def observed(self, spikes: Tensor) -> Tensor:
        if self.observer is not None:
            self.observer(spikes.detach())
        return spikes if self.largest is None else hold(spikes, self.largest)


class ParallelNeuron(NeuronLayer):
    """A layer of neurons that a description tells: LIF, IF, parametric LIF, with the fastest kernels there are.

    A learned time constant 1 / sigmoid(w) is one for the layer: every rank holds `w` whole and sees the gradient of
    its own channels, which `partial_gradient` has summed.

    Args:
        spec: what the neuron computes; None for the neuron of the context (the flags `--neuron`, `--tau` ...).
    Attributes:
        spec: the same.
        w: parameter of a neuron that learns its time constant; otherwise None.
        v: the potential `[N, C_local, *space]` that the last call left, where neurons carry; otherwise None.
    Raises:
        ValueError: the description is of another kind than that of the class.
    """

    kind: str | None = None  # of all neurons that a class makes; None where the description decides
    w: Tensor | None

    def __init__(self, spec: NeuronSpec | None = None, context: BuildContext | None = None) -> None:
        context = context_for(context)
        super().__init__(context)
        spec = spec or context.neuron
        if self.kind not in (None, spec.kind):
            name = type(self).__name__
            raise ValueError(f"{name} is a neuron of kind {self.kind!r}, the description says {spec.kind!r}")
        self.spec, self.backend = spec, context.neuron_backend
        self.v: Tensor | None = None
        self.register_parameter("w", None)
        if NEURONS[spec.kind].learns:
            start = -math.log(spec.tau - 1.0)

            def fill(tensor: Tensor, generator: torch.Generator) -> None:
                tensor.fill_(start)

            declare_parameter(self, "w", context.shard((), partial_gradient=True, initialise=fill), context.dtype)

    def forward(self, x: Tensor) -> Tensor:
        spikes, v = neuron_multi_step(self.at_every_step(x), self.spec, self.v, self.w, self.backend)
        if self.carries and not x.is_meta:
            self.v = v.detach()
        return self.observed(spikes)

    def forget(self) -> None:
        self.v = None

    def extra_repr(self) -> str:
        return f"{self.spec}, time_steps={self.time_steps}"


class ParallelLIF(ParallelNeuron):
    """Leaky integrate-and-fire (SpikingJelly's LIFNode)."""

    kind = "lif"


class ParallelIF(ParallelNeuron):
    """Integrate-and-fire without leak (SpikingJelly's IFNode)."""

    kind = "if"


class ParallelPLIF(ParallelNeuron):
    """LIF with a learned time constant (arXiv 2007.05785; SpikingJelly's ParametricLIFNode)."""

    kind = "plif"
