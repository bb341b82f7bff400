"""Recurrent spiking neurons: a step's input includes the whole layer's spikes of the step before."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megasnn.kernels.neuron_spec import SURROGATES
from megasnn.kernels.torch_backend import REDUCED, surrogate_function
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.linear import ParallelLinear
from megasnn.layers.neuron import NeuronLayer
from megasnn.layers.shape_inference import mark_spikes
from megasnn.layers.tensors import declare
from megasnn.layers.weight_grad import AddGradient, QueueGradient, WeightGradients

Constants = dict[str, Tensor]
"""A neuron's learned values, computed once for all time steps: `[C_local]` by name."""
Range = tuple[float, float]


class RecurrentState(NamedTuple):
    """State between two time steps, each `[N, C_local]`.

    Attributes:
        u: potential.
        s: spikes.
        w: adaptation; zeros in neurons without.
    """

    u: Tensor
    s: Tensor
    w: Tensor


class RecurrentWeight(ParallelLinear):
    """Product of all neurons' last spikes with V `[C, C]`: V[i, j] is the weight from neuron j to i.

    V starts orthogonal. With tensor parallelism a rank has the rows of its own neurons, and gathers the spikes as bits.

    Args:
        self_connections: False keeps V's diagonal at zero.
    """

    multiplies_by_weight = True

    def __init__(self, channels: int, context: BuildContext, *, self_connections: bool = True) -> None:
        initialise = _orthogonal if self_connections else _orthogonal_between
        super().__init__(channels, channels, context, style="column", bias=False, initialise=initialise)
        # A call is one time step, and does not stand for all of them.
        self._time_steps = 1
        if not self_connections:
            first = context.tp.rank * len(self.weight)
            self.weight_gradients = _BetweenNeurons(context.weight_gradients, first)


class _BetweenNeurons(WeightGradients):
    """A rank's queue for a weight without a gradient on its diagonal. `first`: its first row's number."""

    def __init__(self, queue: WeightGradients, first: int) -> None:
        super().__init__()
        self._shared = queue
        self._first = first

    def outside_autograd(self, parameter: Tensor) -> tuple[Tensor | None, QueueGradient | None]:
        anchor, queue_gradient = self._shared.outside_autograd(parameter)
        if queue_gradient is None:
            return anchor, None
        return anchor, partial(self._queue_between, queue_gradient)

    def _queue_between(self, queue_gradient: QueueGradient, add: AddGradient) -> None:
        def add_between(total: Tensor) -> None:
            add(total)
            total.diagonal(self._first).zero_()

        queue_gradient(add_between)


class RecurrentNeuron(NeuronLayer):
    """Base of neurons with recurrent weights: currents `[T, N, C_local]` -> spikes. Starts at zero.

    Args:
        recurrent: False for neurons that do not see each other.
        surrogate, alpha: a name in megasnn.kernels.SURROGATES, and its sharpness; None for its default.
    Raises:
        ValueError: an unknown surrogate; in forward, an input with other dimensions.
    Attributes:
        recurrent: the recurrent weights, or None.
    """

    threshold = 1.0

    def __init__(
        self,
        channels: int,
        context: BuildContext | None = None,
        *,
        recurrent: bool = True,
        self_connections: bool = True,
        surrogate: str,
        alpha: float | None = None,
    ) -> None:
        context = context_for(context)
        super().__init__(context)
        self.channels = channels
        self.recurrent: RecurrentWeight | None = None
        if recurrent:
            self.recurrent = RecurrentWeight(channels, context, self_connections=self_connections)
        sharpness = SURROGATES.of_argument("surrogate", surrogate).alpha if alpha is None else alpha
        self._spike = surrogate_function(surrogate, sharpness)
        self._context = context

    def per_channel(self, name: str, bounds: Range) -> None:
        """Declares a learned parameter, one value a neuron, that starts uniform between two bounds."""
        low, high = bounds

        def initialise(tensor: Tensor, generator: torch.Generator) -> None:
            tensor.uniform_(low, high, generator=generator)

        shard = self._context.shard((self.channels,), 0, initialise=initialise)
        declare(self, name, shard, self._context.dtype)

    @abstractmethod
    def constants(self) -> Constants:
        """Learned values inside their bounds."""

    @abstractmethod
    def step(self, current: Tensor, state: RecurrentState, constants: Constants) -> RecurrentState:
        """One time step; `current` includes the recurrent input."""

    def fire(self, u: Tensor) -> Tensor:
        """1 where the potential has reached the threshold, with the surrogate's gradient."""
        return mark_spikes(self._spike(u - self.threshold))

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.at_every_step(x)
        if inputs.ndim != 3:
            raise ValueError(
                f"recurrent neurons take currents [T, N, C], got {list(inputs.shape)}; flatten space first"
            )
        if x.dtype in REDUCED:
            # Potentials add up over the time steps, and bfloat16 would round each sum.
            inputs = inputs.float()
        constants = {name: value.to(inputs.dtype) for name, value in self.constants().items()}
        rest = torch.zeros_like(inputs[0])
        state = self.last_state or RecurrentState(rest, mark_spikes(torch.zeros_like(rest)), rest)
        spikes = []
        for current in inputs:
            if self.recurrent is not None:
                current = current + self.recurrent(state.s.unsqueeze(0)).squeeze(0)
            state = self.step(current, state, constants)
            spikes.append(state.s)
        if self.stateful and not x.is_meta:
            self.last_state = RecurrentState(*[each.detach() for each in state])
        return self.observe(torch.stack(spikes).to(x.dtype))


def _orthogonal(tensor: Tensor, generator: torch.Generator) -> None:
    nn.init.orthogonal_(tensor, generator=generator)


def _orthogonal_between(tensor: Tensor, generator: torch.Generator) -> None:
    _orthogonal(tensor, generator)
    tensor.fill_diagonal_(0.0)
