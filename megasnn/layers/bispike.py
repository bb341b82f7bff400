"""The layer of elastic bi-spiking neurons (SpikeLM, arXiv 2406.03287)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megasnn.kernels import NeuronSpec
from megasnn.kernels.bispike import DECAY
from megasnn.kernels.neuron import neuron_multi_step
from megasnn.kernels.spike_codec import Content
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.init import zeros
from megasnn.layers.neuron import NeuronLayer
from megasnn.layers.tensors import declare
from megasnn.parallel.collectives import gather_columns
from megasnn.parallel_state import Group


class ParallelBiSpike(NeuronLayer):
    """Fires -1, 0 or 1 on `[T, N, C_local, *space]`; see `megasnn.kernels.bispike`.

    Spikes have no amplitude, so that they travel and are kept as two bits. Pass a product of them to `scaled`.

    Args:
        spec: None for the context's neuron; `v_threshold` is the amplitude.
        calibrated: each time step has its own amplitude, twice the mean magnitude of the potential in the first batch,
            as in the authors' code. A buffer keeps them; zeros until then.
    Attributes:
        last_state: the potential carried on, `[N, C_local, *space]`.
        amplitude: of each time step `[T]`, with `calibrated`; otherwise None.
    Raises:
        ValueError: another kind of neuron, or an amplitude beside `calibrated`.
    """

    kind = "bispike"
    lowest = -1
    amplitude: Tensor | None

    def __init__(
        self, spec: NeuronSpec | None = None, context: BuildContext | None = None, *, calibrated: bool = False
    ) -> None:
        context = context_for(context)
        super().__init__(context)
        spec = spec or context.neuron
        if spec.kind != self.kind:
            raise ValueError(f"{type(self).__name__} is of kind {self.kind!r}, got a description of {spec.kind!r}")
        if calibrated and spec.v_threshold != 1.0:
            raise ValueError(f"--v-threshold {spec.v_threshold} beside amplitudes of the first batch: leave one out")
        if calibrated and context.stateful:
            raise ValueError("--bptt-steps shows the first batch in windows, and amplitudes follow from all of it")
        self.spec = spec
        self.backend = context.numerics.neuron_backend
        # All ranks with other channels, samples or tokens of the same micro-batch.
        self._sharing: tuple[Group, ...] = (context.tp, context.state.cp)
        self._calibrates = False
        self.register_buffer("amplitude", None)
        if calibrated:
            shard = context.shard((self.time_steps,), initialise=zeros)
            declare(self, "amplitude", shard, context.dtype, is_parameter=False)

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.at_every_step(x)
        if self._calibrates:
            self._calibrate(inputs)
        spikes, v = neuron_multi_step(inputs, self.spec, self.last_state, self.amplitude, self.backend)
        if self.stateful and not x.is_meta:
            self.last_state = v.detach()
        return self.observe(spikes)

    @property
    def scale(self) -> Tensor | float:
        """The amplitude; with `calibrated` of each time step, `[T]`."""
        return self.spec.v_threshold if self.amplitude is None else self.amplitude

    def apply_amplitude(self, y: Tensor) -> Tensor:
        """A product of the spikes, without bias, `[T, ...]`: as of spikes with the amplitude."""
        if self.amplitude is not None:
            return y * self.amplitude.to(y.dtype).view(-1, *[1] * (y.ndim - 1))
        return y if self.spec.v_threshold == 1.0 else y * self.spec.v_threshold

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Forwards inside set amplitudes by their inputs. Collective over ranks with one micro-batch."""
        self._calibrates = True
        try:
            yield
        finally:
            self._calibrates = False

    @torch.no_grad()
    def _calibrate(self, inputs: Tensor) -> None:
        assert self.amplitude is not None
        carried = torch.zeros_like(inputs[0], dtype=torch.promote_types(inputs.dtype, torch.float32))
        for step, current in enumerate(inputs):
            m = carried + current
            a = 2 * self._mean_over_ranks(m.abs())
            self.amplitude[step] = a
            spikes = (m > a / 2).to(m.dtype) - (m < -a / 2).to(m.dtype)
            carried = DECAY * a * m * (1 - spikes)

    def _mean_over_ranks(self, values: Tensor) -> Tensor:
        """Mean over all ranks' values, a scalar of their type; the same bits on each."""
        # In float64, and in rank order: a rounding at a threshold is another spike.
        sums = torch.stack([values.sum(dtype=torch.float64), values.new_full((), values.numel(), dtype=torch.float64)])
        for group in self._sharing:
            gathered, _ = gather_columns(sums.view(1, 2), group, Content.DENSE)
            sums = gathered.view(group.size, 2).sum(0)
        return (sums[0] / sums[1]).to(values.dtype)
