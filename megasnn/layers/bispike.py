"""The layer of elastic bi-spiking neurons (SpikeLM, arXiv 2406.03287)."""

from __future__ import annotations

from torch import Tensor

from megasnn.kernels import NeuronSpec
from megasnn.kernels.neuron import neuron_multi_step
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.neuron import NeuronLayer


class ParallelBiSpike(NeuronLayer):
    """Fires -1, 0 or 1 on `[T, N, C_local, *space]`; see `megasnn.kernels.bispike`.

    Spikes have no amplitude, so that they travel and are kept as two bits. Multiply a product of them by `scaled`.

    Args:
        spec: None for the context's neuron; `v_threshold` is the amplitude.
    Attributes:
        v: potential carried on `[N, C_local, *space]` after a stateful neuron's last call, or None.
    """

    kind = "bispike"
    lowest = -1

    def __init__(self, spec: NeuronSpec | None = None, context: BuildContext | None = None) -> None:
        context = context_for(context)
        super().__init__(context)
        spec = spec or context.neuron
        if spec.kind != self.kind:
            raise ValueError(f"{type(self).__name__} is of kind {self.kind!r}, got a description of {spec.kind!r}")
        self.spec = spec
        self.backend = context.numerics.neuron_backend
        self.v: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        spikes, v = neuron_multi_step(self.at_every_step(x), self.spec, self.v, None, self.backend)
        if self.stateful and not x.is_meta:
            self.v = v.detach()
        return self.observed(spikes)

    def scaled(self, y: Tensor) -> Tensor:
        """A product of the spikes, without bias, `[T, ...]`: as of spikes with the amplitude."""
        return y if self.spec.v_threshold == 1.0 else y * self.spec.v_threshold

    def forget(self) -> None:
        self.v = None
