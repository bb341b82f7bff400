"""Spiking neurons on a rank's channels, as in SpikingJelly, and the base class for custom ones."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megasnn.common.recompute import is_replaying
from megasnn.kernels import NEURONS, NeuronSpec
from megasnn.kernels.neuron import neuron_multi_step
from megasnn.kernels.neuron_spec import SURROGATES
from megasnn.kernels.torch_backend import REDUCED, surrogate_function
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.facts import refuse_second_call
from megasnn.layers.init import constant
from megasnn.layers.shape_inference import mark_spikes
from megasnn.layers.tensors import declare
from megasnn.parallel.sharding import Initialiser

SpikeObserver = Callable[[Tensor], None]
State = dict[str, Tensor]


class NeuronLayer(nn.Module):
    """Base of all neuron layers: `[T, N, C_local, *space]` -> spikes, each channel by itself.

    An input with a single time step is repeated T times. Every call starts at rest; stateful neurons continue from the
    last call's state, detached from the graph, until `forget`.

    Attributes:
        time_steps: T.
        stateful: truncated backpropagation through time.
        last_state: a stateful neuron's after its last call; None at rest.
        observer: called with every forward's spikes, if set.
        lowest, largest: bounds of the outputs, if all are integers; `largest` is None otherwise. Ternary spikes have
            -1 and 1.
        once_because: why one forward may call the layer only once, or None.
    """

    lowest: int = 0
    largest: int | None = 1
    once_because: str | None = None

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        self.time_steps = context.time_steps
        self.stateful = context.stateful
        self.last_state: Any = None
        self.observer: SpikeObserver | None = None
        if self.stateful:
            self.once_because = "with --bptt-steps it would continue from the first call: make a neuron for each call"

    def steps_of(self, x: Tensor) -> int:
        steps = x.shape[0]
        return self.time_steps if steps == 1 else steps

    def at_every_step(self, x: Tensor) -> Tensor:
        """The input at all time steps. In the dry run, raises ValueError for a forbidden second call."""
        if x.is_meta and self.once_because is not None:
            refuse_second_call(self, self.once_because)
        steps = self.steps_of(x)
        # A view: T equal steps take the memory of one.
        return x if len(x) == steps else x.expand(steps, *x.shape[1:])

    def forget(self) -> None:
        """Resets the state to rest."""
        self.last_state = None

    @property
    def is_observed(self) -> bool:
        return self.observer is not None and bool(getattr(self.observer, "is_on", True))

    def observe(self, spikes: Tensor) -> Tensor:
        # A recomputed forward gives spikes that were observed before.
        if self.observer is not None and not is_replaying():
            self.observer(spikes.detach())
        if spikes.is_meta and self.largest is not None:
            return mark_spikes(spikes, self.largest, self.lowest)
        return spikes


class ParallelNeuron(NeuronLayer):
    """LIF, IF, parametric and integer LIF from a description, with the fastest kernels.

    Args:
        spec: None for the context's neuron (flags --neuron, --tau, ...).
    Attributes:
        w: the layer's learned time constant is 1 / sigmoid(w); or None.
        last_state: the potential, `[N, C_local, *space]`.
    """

    kind: str | None = None
    """Kind of all neurons of a derived class; None for any."""
    w: Tensor | None

    def __init__(self, spec: NeuronSpec | None = None, context: BuildContext | None = None) -> None:
        context = context_for(context)
        super().__init__(context)
        spec = spec or context.neuron
        if self.kind not in (None, spec.kind):
            raise ValueError(f"{type(self).__name__} is of kind {self.kind!r}, got a description of {spec.kind!r}")
        self.spec = spec
        self.backend = context.numerics.neuron_backend
        self.largest = spec.largest
        self.register_parameter("w", None)
        if NEURONS[spec.kind].learns:
            # With this w, 1 / sigmoid(w) is `tau`.
            start = constant(-math.log(spec.tau - 1.0))
            declare(self, "w", context.shard((), partial_gradient=True, initialise=start), context.dtype)

    def forward(self, x: Tensor) -> Tensor:
        spikes, v = neuron_multi_step(self.at_every_step(x), self.spec, self.last_state, self.w, self.backend)
        if self.stateful and not x.is_meta:
            self.last_state = v.detach()
        return self.observe(spikes)


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
    """A neuron layer from a description, or None for the context's; a neuron layer as it is."""
    if isinstance(neuron, NeuronLayer):
        return neuron
    spec = neuron or context_for(context).neuron
    make = NEURONS[spec.kind].layer or _CLASSES.get(spec.kind, ParallelNeuron)
    return make(spec, context)


class SpikingNeuron(NeuronLayer):
    """Base of custom neurons; see docs/models.md. A subclass defines one step on `[N, C_local, *space]`.

    It implements `charge` and `reset`, and optionally `start` and `fire`; `per_channel` declares learned parameters. A
    neuron may depend on its own channel only, and on its own row unless its class has `mixes_rows = True` (see
    `LayerTraits`).

    Args:
        channels: global.
        surrogate, alpha: a name in megasnn.kernels.SURROGATES, and its sharpness; None for its default.
        largest: 1 for spikes, up to 255 for counts, sent as bytes; None for fractions or other negative values.
        lowest: -1, with `largest` 1, for ternary spikes, sent as two bits.
    Raises:
        ValueError: an unknown surrogate, another `lowest`; in forward, spikes with another shape than the input.
    """

    def __init__(
        self,
        channels: int,
        context: BuildContext | None = None,
        *,
        surrogate: str = "sigmoid",
        alpha: float | None = None,
        largest: int | None = 1,
        lowest: int = 0,
    ) -> None:
        context = context_for(context)
        super().__init__(context)
        if (lowest, largest) != (-1, 1) and lowest != 0:
            raise ValueError(f"lowest={lowest} with largest={largest}: give lowest=-1 with largest=1, or lowest=0")
        self.channels = channels
        self.largest = largest
        self.lowest = lowest
        self._context = context
        sharpness = SURROGATES.of_argument("surrogate", surrogate).alpha if alpha is None else alpha
        self._fire = surrogate_function(surrogate, sharpness)

    def per_channel(self, name: str, initial: float | Initialiser) -> None:
        """Declares a learned parameter with one value a channel."""
        initialise = initial if callable(initial) else constant(initial)
        shard = self._context.shard((self.channels,), 0, initialise=initialise)
        declare(self, name, shard, self._context.dtype)

    def of(self, name: str, like: Tensor) -> Tensor:
        """A `per_channel` parameter, broadcastable to `like`, `[N, C_local, *space]`."""
        return getattr(self, name).view(-1, *[1] * (like.ndim - 2)).to(like.dtype)

    def spike(self, x: Tensor) -> Tensor:
        """Heaviside step, 1 for x >= 0, with the surrogate's gradient."""
        return self._fire(x)

    def start(self, x: Tensor) -> State:
        """State at rest; `x` is the first step's input."""
        return {"v": torch.zeros_like(x)}

    @abstractmethod
    def charge(self, x: Tensor, state: State) -> Tensor:
        """Potential before firing."""

    def fire(self, h: Tensor, state: State) -> Tensor:
        """Spikes for a potential; the default threshold is 1."""
        return self.spike(h - 1.0)

    @abstractmethod
    def reset(self, h: Tensor, spikes: Tensor, state: State) -> State:
        """State after firing."""

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.at_every_step(x)
        if x.dtype in REDUCED:
            # Potentials add up over the time steps, and bfloat16 would round each sum.
            inputs = inputs.float()
        state = self.start(inputs[0]) if self.last_state is None else self.last_state
        spikes = []
        for current in inputs:
            h = self.charge(current, state)
            spikes.append(self.fire(h, state))
            state = self.reset(h, spikes[-1], state)
        together = torch.stack(spikes).to(x.dtype)
        if self.lowest < 0:
            # Rounding gives -0, which no packing holds.
            together = together + 0.0
        if together.shape != inputs.shape:
            raise ValueError(f"neurons give spikes of shape {list(together.shape)} for {list(inputs.shape)}")
        if self.stateful and not x.is_meta:
            self.last_state = {name: value.detach() for name, value in state.items()}
        return self.observe(together)
