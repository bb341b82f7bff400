"""The spiking neuron, with SpikingJelly's names and semantics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megasnn.config.checks import above, at_least

Surrogate = Literal[
    "sigmoid",
    "atan",
    "erf",
    "fake_numerical_gradient",
    "log_tailed_relu",
    "nonzero_sign_log_abs",
    "piecewise_exp",
    "piecewise_quadratic",
    "q_pseudo_spike",
    "rect",
    "s2nn",
    "soft_sign",
    "super_spike",
]


@dataclass(frozen=True)
class NeuronConfig:
    """Defaults are those of SpikingJelly's Spikformer."""

    neuron: Literal["lif", "if", "plif"] = "lif"
    """Leaky integrate-and-fire, without leak, or with a learned time constant per layer."""
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
    """Its sharpness; "none" is SpikingJelly's default for it (4 for sigmoid, 2 for atan)."""
    neuron_backend: Literal["auto", "torch", "fused"] = "auto"
    """Plain PyTorch, or the fused kernels; auto takes those where they can be used."""

    def problems(self) -> list[str]:
        wrong = above(self, 0, "v_threshold") or self._reset_problems()
        wrong += self._unused_by_if() if self.neuron == "if" else above(self, 1, "tau")
        bound = at_least if self.surrogate == "log_tailed_relu" else above
        return wrong + bound(self, 0, "surrogate_alpha")

    def _reset_problems(self) -> list[str]:
        if self.v_reset is None or (math.isfinite(self.v_reset) and self.v_reset < self.v_threshold):
            return []
        return [f"--v-reset {self.v_reset} must be below --v-threshold {self.v_threshold}, or none"]

    def _unused_by_if(self) -> list[str]:
        wrong = []
        if self.tau != type(self).tau:
            wrong.append(f"--tau {self.tau} has no meaning for --neuron if, which does not leak")
        if self.decay_input != type(self).decay_input:
            name = "--decay-input" if self.decay_input else "--no-decay-input"
            wrong.append(f"{name} has no meaning for --neuron if, which does not leak")
        return wrong
