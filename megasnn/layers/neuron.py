"""Spiking neurons over the local channels, with SpikingJelly's semantics, and the base of one's own neurons.

Parallel spiking neurons (PSN, arXiv 2304.12760) have no recurrence, but one learned product over the time steps.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from megasnn.common.recompute import is_replaying
from megasnn.kernels import NEURONS, NeuronSpec
from megasnn.kernels.neuron import neuron_multi_step
from megasnn.kernels.neuron_spec import SURROGATES
from megasnn.kernels.spike_codec import pack_bits, remember_bits, wants_bits
from megasnn.kernels.torch_backend import REDUCED, recompute_in_backward, surrogate_function
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.facts import refuse_second_call
from megasnn.layers.init import constant, uniform
from megasnn.layers.shape_inference import mark_spikes
from megasnn.layers.tensors import declare
from megasnn.parallel.sharding import Initialiser

SpikeObserver = Callable[[Tensor], None]
State = dict[str, Tensor]


class NeuronLayer(nn.Module):
    """Base of all layers of neurons: `[T, N, C_local, *space]` in, spikes out.

    A neuron depends on its own channel only. Input of a single time step comes at each of them. Every call starts at
    rest. Where neurons carry (truncated backpropagation through time), it goes on from the state that the last call
    left, without its history in the graph, until it is told to forget that.

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
            refuse_second_call(self, self.once_because)
        steps = self.steps_of(x)
        return x if len(x) == steps else x.expand(steps, *x.shape[1:])

    @abstractmethod
    def forget(self) -> None:
        """Forgets the state that the last call left."""

    @property
    def is_observed(self) -> bool:
        """Tells whether its spikes are wanted now: an observer may say by `is_on` that it is not looking."""
        return self.observer is not None and bool(getattr(self.observer, "is_on", True))

    def observed(self, spikes: Tensor) -> Tensor:
        if self.observer is not None and not is_replaying():
            self.observer(spikes.detach())
        return mark_spikes(spikes, self.largest) if spikes.is_meta and self.largest is not None else spikes


class ParallelNeuron(NeuronLayer):
    """A layer of neurons that a description tells: LIF, IF, parametric and integer LIF, with the fastest kernels.

    A learned time constant 1 / sigmoid(w) is one for the layer, and its gradient is summed over the channels' ranks.

    Args:
        spec: what the neuron computes; None for the neuron of the context (the flags `--neuron`, `--tau` ...).
    Attributes:
        w: parameter of a neuron that learns its time constant; otherwise None.
        v: the potential `[N, C_local, *space]` that the last call left, where neurons carry; otherwise None.
    """

    kind: str | None = None  # of all neurons that a class makes; None where the description decides
    w: Tensor | None

    def __init__(self, spec: NeuronSpec | None = None, context: BuildContext | None = None) -> None:
        context = context_for(context)
        super().__init__(context)
        spec = spec or context.neuron
        if self.kind not in (None, spec.kind):
            raise ValueError(f"{type(self).__name__} is a neuron of kind {self.kind!r}, and is told {spec.kind!r}")
        self.spec, self.backend, self.largest = spec, context.neuron_backend, spec.largest
        self.v: Tensor | None = None
        self.register_parameter("w", None)
        if NEURONS[spec.kind].learns:
            start = constant(-math.log(spec.tau - 1.0))
            declare(self, "w", context.shard((), partial_gradient=True, initialise=start), context.dtype)

    def forward(self, x: Tensor) -> Tensor:
        spikes, v = neuron_multi_step(self.at_every_step(x), self.spec, self.v, self.w, self.backend)
        if self.carries and not x.is_meta:
            self.v = v.detach()
        return self.observed(spikes)

    def forget(self) -> None:
        self.v = None


class ParallelLIF(ParallelNeuron):
    """Leaky integrate-and-fire (SpikingJelly's LIFNode)."""

    kind = "lif"


class ParallelIF(ParallelNeuron):
    """Integrate-and-fire without leak (SpikingJelly's IFNode)."""

    kind = "if"


class ParallelPLIF(ParallelNeuron):
    """LIF with a learned time constant (arXiv 2007.05785; SpikingJelly's ParametricLIFNode)."""

    kind = "plif"


_CLASSES: dict[str, type[ParallelNeuron]] = {each.kind: each for each in (ParallelLIF, ParallelIF, ParallelPLIF)}


def make_neuron(neuron: NeuronSpec | NeuronLayer | None = None, context: BuildContext | None = None) -> NeuronLayer:
    """A layer of neurons by its description; None is the neuron of the context. A layer of neurons is given back."""
    if isinstance(neuron, NeuronLayer):
        return neuron
    spec = neuron or context_for(context).neuron
    make = NEURONS[spec.kind].layer or _CLASSES.get(spec.kind, ParallelNeuron)
    return make(spec, context)


class SpikingNeuron(NeuronLayer):
    """A layer of `channels` neurons, of which a subclass says one time step, on `[N, C_local, *space]`, by `start`,
    `charge`, `fire` and `reset`, with `per_channel` for what is learned; docs/models.md has an example.

    Neurons are cut by channel over the tensor parallel ranks, and their parameters with them; what is computed may
    depend on a neuron's own channel only, and on its own row of the image, or the class has `mixes_rows = True`.

    Args:
        channels: the global number.
        surrogate, alpha: a name in megasnn.kernels.SURROGATES, and its sharpness; None for its default.
        largest: the largest value that a neuron gives: 1 for spikes, more for counts of them, which travel as bytes;
            None for values that are negative (ternary spikes) or no whole numbers.
    Raises:
        ValueError: an unknown surrogate.
    """

    def __init__(
        self,
        channels: int,
        context: BuildContext | None = None,
        *,
        surrogate: str = "sigmoid",
        alpha: float | None = None,
        largest: int | None = 1,
    ) -> None:
        context = context_for(context)
        super().__init__(context)
        self._context, self.channels, self.largest = context, channels, largest
        self.left: State | None = None  # by the last call, where neurons carry
        sharpness = SURROGATES.of_argument("surrogate", surrogate).alpha if alpha is None else alpha
        self._fire = surrogate_function(surrogate, sharpness)

    def per_channel(self, name: str, initial: float | Initialiser) -> None:
        """Declares a learned parameter with a value for each channel."""
        initialise = initial if callable(initial) else constant(initial)
        shard = self._context.shard((self.channels,), 0, initialise=initialise)
        declare(self, name, shard, self._context.dtype)

    def of(self, name: str, like: Tensor) -> Tensor:
        """A parameter with a value for each channel, shaped to meet `like`, `[N, C_local, *space]`."""
        return getattr(self, name).view(-1, *[1] * (like.ndim - 2)).to(like.dtype)

    def spike(self, x: Tensor) -> Tensor:
        """1 where x is 0 or more, with the surrogate's gradient."""
        return self._fire(x)

    def start(self, x: Tensor) -> State:
        """The state before the first step; `x` is that step's input."""
        return {"v": torch.zeros_like(x)}

    @abstractmethod
    def charge(self, x: Tensor, state: State) -> Tensor:
        """The potential before firing."""

    def fire(self, h: Tensor, state: State) -> Tensor:
        """The spikes, for a potential; by default those of a threshold of 1."""
        return self.spike(h - 1.0)

    @abstractmethod
    def reset(self, h: Tensor, spikes: Tensor, state: State) -> State:
        """The state after firing."""

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.at_every_step(x)
        inputs = inputs.float() if x.dtype in REDUCED else inputs
        state, spikes = self.start(inputs[0]) if self.left is None else self.left, []
        for current in inputs:
            h = self.charge(current, state)
            spikes.append(self.fire(h, state))
            state = self.reset(h, spikes[-1], state)
        together = torch.stack(spikes).to(x.dtype)
        if together.shape != inputs.shape:
            raise ValueError(f"neurons give spikes of shape {list(together.shape)} for {list(inputs.shape)}")
        if self.carries and not x.is_meta:
            self.left = {name: value.detach() for name, value in state.items()}
        return self.observed(together)

    def forget(self) -> None:
        self.left = None


class _ParallelInTime(NeuronLayer):
    """Spikes where W x + b is 0 or more, W being `[T, T]`. There is no potential and no reset.

    Every rank holds the weights whole; their gradient is summed over the channels' ranks. Backward keeps the input.

    Args:
        spec: its surrogate is taken, and `v_threshold`, at which -b starts; None for SpikingJelly's defaults.
    Raises:
        ValueError: the context shows time steps in windows; or, in a forward, weights are for another T.
    """

    kind: str
    weight: Tensor
    bias: Tensor

    def __init__(
        self,
        spec: NeuronSpec | None,
        context: BuildContext,
        weight: tuple[tuple[int, ...], Initialiser],
        shape_of_bias: tuple[int, ...],
    ) -> None:
        super().__init__(context)
        if context.carries:
            raise ValueError(f"--bptt-steps with a {self.kind} neuron, which takes all time steps; leave it out")
        self.spec = spec = spec or NeuronSpec(self.kind, surrogate="atan")
        for name, shape, initialise in (("weight", *weight), ("bias", shape_of_bias, constant(-spec.v_threshold))):
            declare(self, name, context.shard(shape, partial_gradient=True, initialise=initialise), context.dtype)

    @staticmethod
    @abstractmethod
    def matrix(weight: Tensor, steps: int) -> Tensor:
        """W for so many time steps."""

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.at_every_step(x)
        if self.weight.ndim > 1 and len(self.weight) != len(inputs):
            raise ValueError(f"this neuron has weights for {len(self.weight)} time steps, and is given {len(inputs)}")
        if x.is_meta:
            return self.observed(torch.empty_like(inputs))
        fire = surrogate_function(self.spec.surrogate, self.spec.surrogate_alpha)
        compute = partial(_fire_at_once, matrix=self.matrix, fire=fire)
        (spikes,) = recompute_in_backward(compute, inputs, self.weight, self.bias)
        return self.observed(remember_bits(spikes, pack_bits(spikes) if wants_bits(spikes) else None))

    def forget(self) -> None:
        """Has no state."""


class ParallelPSN(_ParallelInTime):
    """Parallel spiking neuron, with weights from every time step to every other (SpikingJelly's PSN). T is fixed."""

    kind = "psn"

    def __init__(self, spec: NeuronSpec | None = None, context: BuildContext | None = None) -> None:
        context = context_for(context)
        steps = context.time_steps
        super().__init__(spec, context, ((steps, steps), uniform(steps)), (steps, 1))

    @staticmethod
    def matrix(weight: Tensor, steps: int) -> Tensor:
        return weight


class ParallelSlidingPSN(_ParallelInTime):
    """Sliding PSN, with the same weights of the last `order` time steps at each of them (SpikingJelly's SlidingPSN).

    Args:
        order: k of the paper; weights start at 1 for the present step and half as much for each one before.
    """

    kind = "sliding_psn"

    def __init__(self, spec: NeuronSpec | None = None, context: BuildContext | None = None, *, order: int = 2) -> None:
        super().__init__(spec, context_for(context), ((order,), _halving), ())

    @staticmethod
    def matrix(weight: Tensor, steps: int) -> Tensor:
        lags = weight.flip(0)[:steps]
        bands = torch.stack([weight.new_ones(steps - lag).diag(-lag) for lag in range(len(lags))])
        return (lags.view(-1, 1, 1) * bands).sum(0)


def _halving(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.copy_(0.5 ** torch.arange(len(tensor) - 1, -1, -1, dtype=torch.float64))


def _fire_at_once(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    matrix: Callable[[Tensor, int], Tensor],
    fire: Callable[[Tensor], Tensor],
) -> tuple[Tensor]:
    """Spikes, channels last in memory; those of reduced types are computed in float32."""
    dtype = torch.float32 if x.dtype in REDUCED else x.dtype
    channels = min(2, x.ndim - 1)
    rows = x.to(dtype).movedim(channels, -1)
    h = torch.addmm(bias.to(dtype), matrix(weight.to(dtype), len(x)), rows.flatten(1))
    return (fire(h).view(rows.shape).movedim(-1, channels).to(x.dtype),)
