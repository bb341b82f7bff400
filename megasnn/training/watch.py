"""What a run measures for its log and for TensorBoard: spikes, memory, time and traffic."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megasnn.comm.statistics import statistics
from megasnn.engine import Engine
from megasnn.parallel_state import ParallelState
from megasnn.telemetry.logline import StageTraffic
from megasnn.telemetry.memory import gather_peak_memory_mb
from megasnn.telemetry.rasters import RasterRecorder
from megasnn.telemetry.spikes import SpikeRecorder, spike_scalars
from megasnn.telemetry.timers import Timers

GROUPS = ("tensor", "data", "pipeline", "backward")


class Watch:
    """
    Attributes:
        spikes: statistics of this rank's neurons, while `spikes.enabled`.
        rasters: which of them fire when, while `rasters.enabled`.
        timers: of the phases of a step.
    """

    def __init__(self, engine: Engine, state: ParallelState) -> None:
        self._engine, self._state = engine, state
        self._counted_from = 0
        self.spikes, self.rasters = SpikeRecorder(), RasterRecorder()
        for name, neuron in engine.neurons():
            neuron.observer = partial(self._observe, name)
        self.timers = Timers(partial(torch.cuda.synchronize, state.device) if state.device.type == "cuda" else None)
        statistics.enable()

    def _observe(self, name: str, spikes: Tensor) -> None:
        self.spikes.observe(name, spikes)
        self.rasters.observe(name, spikes)

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

    def between_stages(self, scalars: dict[str, float]) -> StageTraffic | None:
        """The pipeline's part of `since_last`; None without a pipeline."""
        if self._state.pipeline.size == 1:
            return None
        part = {name.removeprefix("communication/"): value for name, value in scalars.items()}
        return StageTraffic(
            part["pipeline_mb"],
            part["pipeline_mb_if_dense"],
            part["backward_mb"],
            part["backward_mb_if_dense"],
            int(part["unfit_tensors"]),
        )

    def _traffic(self, iterations: int) -> dict[str, float]:
        """MB that all ranks together sent per iteration, by group, and what they were unpacked; collective.

        "pipeline" is what stages hand on in forward, "backward" the gradients that come back. Also the number of
        tensors, since the last call, that did not fit their packed format.
        """
        mine = [statistics.total(group) for group in GROUPS]
        unfit_here = float(statistics.total(operation="send_unfit").calls)
        statistics.reset()
        volumes = [float(t.bytes) for t in mine] + [float(t.dense_bytes) for t in mine]
        *sums, unfit = self._engine.sum_over_ranks([*volumes, unfit_here])
        names = [f"communication/{group}_mb{form}" for form in ("", "_if_dense") for group in GROUPS]
        per_iteration = {name: value / (1e6 * iterations) for name, value in zip(names, sums, strict=True)}
        return {**per_iteration, "communication/unfit_tensors": unfit}
