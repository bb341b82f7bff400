"""Measurements of a run for its log and TensorBoard: spikes, memory, time, traffic, traces and pictures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megasnn.common.memory import memory_scalars, peak_memory_mb
from megasnn.config import PretrainConfig
from megasnn.data import Datasets, GlobalBatch
from megasnn.engine import Engine
from megasnn.parallel.agreement import gather, sum_over_ranks
from megasnn.parallel.collectives import traffic
from megasnn.parallel_state import ParallelState
from megasnn.telemetry.pictures import raster_sheet, sample_sheet
from megasnn.telemetry.reporter import Reporter
from megasnn.telemetry.spikes import LayerSpikes, RasterRecorder, SpikeRecorder, position_in_model
from megasnn.training.startup_log import log_folder

PROFILED_SAMPLES = 8


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
        layers = sorted(chain(*of_stages), key=lambda layer: position_in_model(layer.name, self._order))
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
        sizes = [float(counts.bytes) for counts in mine] + [float(counts.dense_bytes) for counts in mine]
        sums = sum_over_ranks(self._distributed.state.world.handle, sizes)
        names = [f"communication/{group}_mb{form}" for form in ("", "_if_dense") for group in self._groups]
        return {name: value / (1e6 * iterations) for name, value in zip(names, sums, strict=True)}


class StepTrace:
    """Traces the iteration of --profile-step on the ranks of the first replica. An error in it ends no run.

    Args:
        span: iterations that were done before, and those of the whole run.
    """

    def __init__(self, config: PretrainConfig, state: ParallelState, span: tuple[int, int], reporter: Reporter) -> None:
        step, (done, iterations) = config.logging.profile_step, span
        if step is not None and not done < step <= iterations:
            reporter.line(f"WARNING: --profile-step {step}, and the run has iterations {done + 1} to {iterations}")
        self._step, self._reporter = step if state.dp.rank == 0 else None, reporter
        gpu = [ProfilerActivity.CUDA] if state.device.type == "cuda" else []
        self._activities = [ProfilerActivity.CPU, *gpu]
        self._path = (log_folder(config) or Path()) / "traces" / f"rank{state.rank}-{step}.pt.trace.json"

    @contextmanager
    def around(self, number: int) -> Iterator[None]:
        """Traces iteration `number` in the block, where it is due."""
        if number != self._step:
            yield
            return
        trace, tried = profile(activities=self._activities), self._reporter.best_effort
        with tried("the trace of --profile-step"):
            trace.start()
        yield
        with tried("the trace of --profile-step"):
            trace.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(self._path))
            self._reporter.line(f"wrote {self._path}")


class Pictures:
    """Shows samples and spikes as pictures in TensorBoard.

    Args:
        rasters: filled by this rank's neurons.
    """

    def __init__(
        self, config: PretrainConfig, engine: Engine, datasets: Datasets, rasters: RasterRecorder, reporter: Reporter
    ) -> None:
        self._interval, self._reporter, self._state = config.logging.picture_interval, reporter, engine.state
        self._layers = [layer.name for layer in engine.distributed.description.layers]
        self._labels, self._rasters = datasets.train.labels, rasters
        # The pipeline of the rank that writes; its other stages send theirs.
        self._draws = engine.state.dp_cp.rank == 0 and engine.state.tp.rank == 0
        self._shown = False

    def begin(self, batch: GlobalBatch, iteration: int) -> None:
        """Shows samples of the run's first batch before a step, and observes the neurons where that is due.

        Args:
            iteration: steps done before this one.
        """
        if not self._interval:
            return
        self._rasters.enabled = self._draws and (iteration + 1) % self._interval == 0
        micro = batch.micro_batches[0]
        if not self._shown and self._state.rank == 0 and isinstance(micro.inputs, Tensor):  # not arrays by name
            samples = list(micro.inputs[:PROFILED_SAMPLES].cpu().numpy())
            classes = self._labels[micro.sample_ids[: len(samples)].numpy()].tolist()
            captions = [f"class {label}" for label in classes]
            self._reporter.board.picture("samples", lambda: sample_sheet(samples, captions), iteration)
        self._shown = True

    def end(self, iteration: int) -> None:
        """Draws rasters after a step, with that one counted, where they are due. Collective over the pipeline."""
        if not self._rasters.enabled:
            return
        self._rasters.enabled = False
        of_stages = gather(self._state.pp.handle, self._rasters.take())
        found = {name: raster for stage in of_stages for name, raster in stage.items()}
        rasters = {name: found[name] for name in sorted(found, key=lambda name: position_in_model(name, self._layers))}
        if self._state.rank == 0 and rasters:
            self._reporter.board.picture("spikes/raster", lambda: raster_sheet(rasters), iteration)
