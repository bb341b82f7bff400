"""The base of neurons of one's own: a class with charge, fire and reset, computed by plain PyTorch on any layout."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from megasnn.kernels.neuron_spec import SURROGATES
from megasnn.kernels.torch_backend import REDUCED, surrogate_function
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.neuron import NeuronLayer
from megasnn.parallel.sharding import Initialiser, declare_parameter

State = dict[str, Tensor]


class SpikingNeuron(NeuronLayer):
    """A layer of `channels` neurons. A subclass says one time step, on `[N, C_local, *space]`:

        class AdaptiveLIF(SpikingNeuron):  # the threshold rises with every spike
            def __init__(self, channels: int) -> None:
                super().__init__(channels, surrogate="atan")
                self.per_channel("rise", 0.2)

            def start(self, x):
                return {"v": torch.zeros_like(x), "a": torch.zeros_like(x)}

            def charge(self, x, state):
                return state["v"] + (x - state["v"]) / 2

            def fire(self, h, state):
                return self.spike(h - 1 - self.of("rise", h) * state["a"])

            def reset(self, h, spikes, state):
                return {"v": h * (1 - spikes.detach()), "a": 0.9 * state["a"] + spikes}

    Neurons are cut by channel over the tensor parallel ranks, and their parameters with them; what is computed may
    depend on a neuron's own channel only, and on its own row of the image, or the class has `mixes_rows = True`. Every
    call starts anew, or with --bptt-steps goes on from the state that the window before left.

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
        self._local_channels = channels // context.tensor.size
        self.left: State | None = None  # by the last call, where neurons carry
        sharpness = SURROGATES.of_argument("surrogate", surrogate).alpha if alpha is None else alpha
        self._fire = surrogate_function(surrogate, sharpness)

    def per_channel(self, name: str, initial: float | Initialiser) -> None:
        """Declares a learned parameter with a value for each channel."""
        context = self._context

        def fill(tensor: Tensor, generator: torch.Generator) -> None:
            tensor.fill_(float(initial))  # type: ignore[arg-type]

        initialise = initial if callable(initial) else fill
        declare_parameter(self, name, context.shard((self.channels,), 0, initialise=initialise), context.dtype)

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
        if x.is_meta:
            self._try(inputs[0])
            return self.observed(torch.empty_like(inputs))
        inputs = inputs.float() if x.dtype in REDUCED else inputs
        state, spikes = self.start(inputs[0]) if self.left is None else self.left, []
        for current in inputs:
            h = self.charge(current, state)
            spikes.append(self.fire(h, state))
            state = self.reset(h, spikes[-1], state)
        if self.carries:
            self.left = {name: value.detach() for name, value in state.items()}
        return self.observed(torch.stack(spikes).to(x.dtype))

    def forget(self) -> None:
        self.left = None

    def _try(self, x: Tensor) -> None:
        """Two steps of the dry run, the second from the state that the first has left. Raises ValueError for channels
        that are not this layer's, another shape, or what is no state."""
        if x.shape[1] != self._local_channels:
            raise ValueError(
                f"neurons of {self.channels} channels are given {x.shape[1]}, with their share of the ranks"
            )
        state = _state(self.start(x), "start")
        for _ in range(2):
            h = self.charge(x, state)
            spikes = self.fire(h, state)
            if spikes.shape != x.shape:
                raise ValueError(
                    f"neurons give spikes of shape {list(spikes.shape)} for a step of shape {list(x.shape)}"
                )
            state = _state(self.reset(h, spikes, state), "reset")

    def extra_repr(self) -> str:
        return f"{self.channels}, time_steps={self.time_steps}"


def _state(given: object, method: str) -> State:
    if isinstance(given, dict):
        return given
    kind = type(given).__name__
    raise ValueError(f"{method} is to return a dict of tensors, the state for the next step, and returns a {kind}")
