"""Measurements of a run for its log and for TensorBoard: spikes, memory, time and traffic."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from megasnn.engine import Engine
from megasnn.parallel.agreement import gather
from megasnn.parallel.traffic import traffic
from megasnn.telemetry.memory import memory_scalars, peak_memory_mb
from megasnn.telemetry.spikes import LayerSpikes, RasterRecorder, SpikeRecorder, place_in_model


@dataclass(frozen=True)
class _Observer:
    """Observer of one layer of neurons."""

    spikes: SpikeRecorder
    rasters: RasterRecorder
    name: str

    @property
    def is_on(self) -> bool:
        return self.spikes.enabled or self.rasters.enabled

    def __call__(self, spikes: Tensor) -> None:
        self.spikes.observe(self.name, spikes)
        self.rasters.observe(self.name, spikes)


class Metrics:
    """Measures spikes, memory, time and traffic of a run.

    Attributes:
        spikes: statistics of this rank's neurons, while `spikes.enabled`.
        rasters: which of them fire when, while `rasters.enabled`.
    """

    def __init__(self, engine: Engine) -> None:
        self._distributed, self._state, self._timers = engine.distributed, engine.state, engine.step.timers
        self._counted_from = 0
        self._order = [layer.name for layer in self._distributed.description.layers]
        self.spikes, self.rasters = SpikeRecorder(), RasterRecorder()
        for name, neuron in self._distributed.neurons():
            neuron.observer = _Observer(self.spikes, self.rasters, name)
        state = self._state  # a group of one rank sends nothing
        groups = {"tp": state.tp, "cp": state.cp, "dp": state.dp_cp}
        self._groups = [name for name, group in groups.items() if group.size > 1]
        self._groups += ["pp", "backward"] if state.pp.size > 1 else []

    def since_last(self, iteration: int) -> tuple[dict[str, float], list[LayerSpikes]]:
        """Returns scalars since the last call, and the spikes of each layer in the model's order. Collective.

        Scalars are memory, and per iteration time and traffic, by name.
        """
        state, by_samples = self._state, self._distributed.context.cut == "samples"
        # Ranks that share micro-batches by samples have the same neurons, and by rows other ones of a layer.
        same, rows = (state.dp_cp, None) if by_samples else (state.dp, state.cp.handle)
        others = state.tp.handle, rows
        of_stages = gather(state.pp.handle, self.spikes.reduce(same.handle, others))
        layers = sorted(chain(*of_stages), key=lambda layer: place_in_model(layer.name, self._order))
        peaks = gather(state.world.handle, peak_memory_mb(state.device))
        iterations = max(iteration - self._counted_from, 1)
        self._counted_from = iteration
        times = {f"time/{name}_ms": mean for name, mean in self._timers.mean_ms().items()}
        return {**memory_scalars(peaks), **times, **self._traffic(iterations)}, layers

    def _traffic(self, iterations: int) -> dict[str, float]:
        """MB that all ranks together received per iteration, by group, and what they were unpacked. Collective.

        "pp" is what stages send in forward, "backward" the gradients that come back; "dp" also counts the
        gradients that replicas sum with the ranks that share their micro-batches.
        """
        mine = [traffic.by_group[group] for group in self._groups]
        traffic.reset()
        if not self._groups:
            return {}
        sums = self._distributed.sum_over_ranks([float(t.bytes) for t in mine] + [float(t.dense_bytes) for t in mine])
        names = [f"communication/{group}_mb{form}" for form in ("", "_if_dense") for group in self._groups]
        return {name: value / (1e6 * iterations) for name, value in zip(names, sums, strict=True)}
