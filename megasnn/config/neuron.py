"""The spiking neuron, with SpikingJelly's names and semantics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from megasnn.config.checks import above, at_least
from megasnn.config.names import name_in
from megasnn.kernels import BACKENDS, NEURONS, SURROGATES, NeuronSpec

Surrogate = Annotated[str, name_in(SURROGATES)]


@dataclass(frozen=True)
class NeuronConfig:
    """Defaults are those of SpikingJelly's Spikformer."""

    neuron: Annotated[str, name_in(NEURONS)] = "lif"
    """Kind of neuron."""
    tau: float = 2.0
    """Membrane time constant of lif in time steps; of plif, the initial one."""
    v_threshold: float = 1.0
    """Potential from which the neuron fires. The neuron behind Spikformer's attention fires from 0.5
    instead, always."""
    v_reset: float | None = 0.0
    """Potential after a spike. "none" is a soft reset: the threshold is subtracted."""
    decay_input: bool = True
    """Whether the input is divided by the time constant too."""
    detach_reset: bool = True
    """Whether the reset is left out of the gradient."""
    surrogate: Surrogate = "sigmoid"
    """Surrogate gradient of the spike."""
    surrogate_alpha: float | None = None
    """Sharpness of the surrogate gradient; "none" is SpikingJelly's default for it (4 for sigmoid, 2 for atan)."""
    neuron_backend: Annotated[str, name_in(BACKENDS)] = "auto"
    """What computes the neurons; auto takes the fastest that can be used."""

    @property
    def spec(self) -> NeuronSpec:
        """The neuron that these flags describe. Raises ValueError for values that `problems` lists."""
        return NeuronSpec(
            self.neuron,
            self.tau,
            self.v_threshold,
            self.v_reset,
            self.decay_input,
            self.detach_reset,
            self.surrogate,
            self.surrogate_alpha,
        )

    def problems(self) -> list[str]:
        wrong = above(self, 0, "v_threshold") or self._reset_problems()
        wrong += above(self, 1, "tau") if NEURONS[self.neuron].leaks else self._unused_without_leak()
        bound = above if SURROGATES[self.surrogate].alpha > 0 else at_least
        return wrong + bound(self, 0, "surrogate_alpha")

    def _reset_problems(self) -> list[str]:
        if self.v_reset is None or (math.isfinite(self.v_reset) and self.v_reset < self.v_threshold):
            return []
        return [f"--v-reset {self.v_reset} must be below --v-threshold {self.v_threshold}, or none"]

    def _unused_without_leak(self) -> list[str]:
        wrong = []
        if self.tau != type(self).tau:
            wrong.append(f"--tau {self.tau} has no meaning for --neuron {self.neuron}, which does not leak")
        if self.decay_input != type(self).decay_input:
            name = "--decay-input" if self.decay_input else "--no-decay-input"
            wrong.append(f"{name} has no meaning for --neuron {self.neuron}, which does not leak")
        return wrong
