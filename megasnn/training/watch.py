"""What a run measures for its log and for TensorBoard: spikes, memory, time and traffic."""

from __future__ import annotations

from functools import partial

import torch

from megasnn.comm.statistics import statistics
from megasnn.engine import Engine
from megasnn.parallel_state import ParallelState
from megasnn.telemetry.memory import gather_peak_memory_mb
from megasnn.telemetry.spikes import SpikeRecorder, spike_scalars
from megasnn.telemetry.timers import Timers

GROUPS = ("tensor", "data", "pipeline", "backward")


class Watch:
    """
    Attributes:
        spikes: statistics of this rank's neurons, while `spikes.enabled`.
        timers: of the phases of a step.
    """

    def __init__(self, engine: Engine, state: ParallelState) -> None:
        self._engine, self._state = engine, state
        self._counted_from = 0
        self.spikes = SpikeRecorder()
        for name, neuron in engine.neurons():
            neuron.observer = partial(self.spikes.observe, name)
        self.timers = Timers(partial(torch.cuda.synchronize, state.device) if state.device.type == "cuda" else None)
        statistics.enable()

    def since_last(self, iteration: int) -> dict[str, float]:
        """Scalars by name: spikes, memory, and per iteration time and traffic, since the last call; collective."""
        state = self._state
        layers = self.spikes.reduce(state.data.handle, state.tensor.handle, state.pipeline.handle)
        peaks = gather_peak_memory_mb(state.device, state.world.handle)
        iterations = max(iteration - self._counted_from, 1)
        self._counted_from = iteration
        return {
            **spike_scalars(layers),
            **{f"memory/peak_mb/rank{rank}": peak for rank, peak in enumerate(peaks)},
            **{f"time/{name}_ms": mean for name, mean in self.timers.mean_ms().items()},
            **self._traffic(iterations),
        }

    def _traffic(self, iterations: int) -> dict[str, float]:
        """MB that all ranks together sent per iteration, by group, and what they were unpacked; collective."""
        mine = [statistics.total(group) for group in GROUPS]
        statistics.reset()
        sums = self._engine.sum_over_ranks([t.bytes for t in mine] + [t.dense_bytes for t in mine])
        names = [f"communication/{group}_mb{form}" for form in ("", "_if_dense") for group in GROUPS]
        return {name: value / (1e6 * iterations) for name, value in zip(names, sums, strict=True)}
