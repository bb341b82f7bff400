"""The spiking neuron, with SpikingJelly's names and semantics."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

from pydantic.dataclasses import dataclass

from megasnn.common.files import STRICT
from megasnn.config.checks import NonNegative, Positive, refusal
from megasnn.kernels import BACKENDS, NEURONS, SURROGATES, NeuronSpec

SurrogateName = Annotated[str, SURROGATES]


@dataclass(frozen=True, config=STRICT)
class NeuronConfig:
    """Defaults are those of SpikingJelly's Spikformer."""

    neuron: Annotated[str, NEURONS] = "lif"
    """Kind of neuron; ilif4 fires up to 4 spikes a step, bispike -1, 0 or 1."""
    tau: Positive = 2.0
    """Membrane time constant of lif and ilif in time steps; initial value for plif."""
    v_threshold: Positive = 1.0
    """Firing threshold of the potential; bispike's amplitude. Spikformer's neuron behind attention always has 0.5."""
    v_reset: float | None = 0.0
    """Potential after a spike; "none" is a soft reset, which subtracts the threshold."""
    decay_input: bool = True
    """Divide the input by the time constant too."""
    detach_reset: bool = True
    """Leave the reset out of the gradient."""
    surrogate: SurrogateName = "sigmoid"
    """Surrogate gradient of the spike."""
    surrogate_alpha: NonNegative | None = None
    """Sharpness of the surrogate gradient; "none" is SpikingJelly's default (4 for sigmoid, 2 for atan)."""
    neuron_backend: Annotated[str, BACKENDS] = "auto"
    """Implementation of the neurons; auto takes the fastest available."""

    @property
    def spec(self) -> NeuronSpec:
        """Raises ValueError for values that `problems` lists."""
        shared: dict[str, Any] = {}
        for each in fields(NeuronSpec):
            # The remaining two, kind and alpha, have longer flags: --neuron and --surrogate-alpha.
            if hasattr(self, each.name):
                shared[each.name] = getattr(self, each.name)
        return NeuronSpec(self.neuron, alpha=self.surrogate_alpha, **shared)

    def problems(self) -> list[str]:
        """Contradictions, with values and flags."""
        wrong = []
        if self.v_reset is not None and self.v_reset >= self.v_threshold:
            wrong.append(f"--v-reset {self.v_reset} must be below --v-threshold {self.v_threshold}, or none")
        if SURROGATES[self.surrogate].alpha > 0 and self.surrogate_alpha == 0:
            wrong.append(f"--surrogate-alpha 0 must be greater than 0 for --surrogate {self.surrogate}")
        return wrong + refusal(lambda: self.spec)
