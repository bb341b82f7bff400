"""What a run measures for its log and for TensorBoard: spikes, memory, time and traffic."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megasnn.engine.distributed_model import DistributedModel
from megasnn.parallel.traffic import statistics
from megasnn.parallel_state import ParallelState
from megasnn.telemetry.memory import gather_peak_memory_mb, memory_scalars
from megasnn.telemetry.spikes import LayerSpikes, RasterRecorder, SpikeRecorder
from megasnn.telemetry.timers import Timers


@dataclass(frozen=True)
class Measured:
    """What was measured since the last log line.

    Attributes:
        scalars: memory, and per iteration time and traffic, by name.
        layers: the spikes of each layer of neurons, in the model's order.
    """

    scalars: dict[str, float]
    layers: list[LayerSpikes]


@dataclass(frozen=True)
class _Observer:
    """Of one layer of neurons."""

    spikes: SpikeRecorder
    rasters: RasterRecorder
    name: str

    @property
    def is_on(self) -> bool:
        return self.spikes.enabled or self.rasters.enabled

    def __call__(self, spikes: Tensor) -> None:
        self.spikes.observe(self.name, spikes)
        self.rasters.observe(self.name, spikes)


class Watch:
    """Measures spikes, memory, time and traffic of a run.

    Attributes:
        spikes: statistics of this rank's neurons, while `spikes.enabled`.
        rasters: which of them fire when, while `rasters.enabled`.
        timers: of the phases of a step.
    """

    def __init__(self, model: DistributedModel, state: ParallelState, timers: Timers) -> None:
        self._distributed, self._state, self.timers = model, state, timers
        self._counted_from = 0
        self._by_samples = model.context.cut == "samples"
        self._order = [layer.name for layer in model.model.layers]
        self.spikes, self.rasters = SpikeRecorder(), RasterRecorder()
        for name, neuron in model.neurons():
            neuron.observer = _Observer(self.spikes, self.rasters, name)
        # A group of one rank sends nothing.
        self._groups = [name for name in ("tensor", "context", "data") if getattr(state, name).size > 1]
        self._groups += ["dp_replicate_cp"] * (state.context.size > 1)  # whose traffic is elsewhere that of "data"
        self._groups += ["pipeline", "backward"] if state.pipeline.size > 1 else []

    def since_last(self, iteration: int) -> Measured:
        """What was measured since the last call; collective."""
        state = self._state
        # Ranks that share micro-batches by samples have the same neurons, and by rows other ones of a layer.
        same, rows = (state.dp_cp, None) if self._by_samples else (state.data, state.context.handle)
        others = state.tensor.handle, rows
        layers = self.spikes.reduce(same.handle, others, state.pipeline.handle, self._order)
        peaks = gather_peak_memory_mb(state.device, state.world.handle)
        iterations = max(iteration - self._counted_from, 1)
        self._counted_from = iteration
        times = {f"time/{name}_ms": mean for name, mean in self.timers.mean_ms().items()}
        return Measured({**memory_scalars(peaks), **times, **self._traffic(iterations)}, layers)

    def _traffic(self, iterations: int) -> dict[str, float]:
        """MB that all ranks together received per iteration, by group, and what they were unpacked; collective.

        "pipeline" is what stages hand on in forward, "backward" the gradients that come back; "dp_replicate_cp" are the
        gradients that replicas sum with the ranks that share their micro-batches.
        """
        mine = [statistics.total(group) for group in self._groups]
        statistics.reset()
        if not self._groups:
            return {}
        sums = self._distributed.sum_over_ranks([float(t.bytes) for t in mine] + [float(t.dense_bytes) for t in mine])
        names = [f"communication/{group}_mb{form}" for form in ("", "_if_dense") for group in self._groups]
        return {name: value / (1e6 * iterations) for name, value in zip(names, sums, strict=True)}
