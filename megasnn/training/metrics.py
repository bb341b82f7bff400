"""Measures for log and TensorBoard: spikes, memory, time, traffic, traces and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megasnn.common.memory import memory_scalars, peak_memory_mb
from megasnn.config import PretrainConfig
from megasnn.data import Datasets, RankBatch
from megasnn.engine import Engine
from megasnn.parallel.agreement import gather, sum_over_ranks
from megasnn.parallel.traffic import traffic
from megasnn.parallel_state import ParallelState
from megasnn.telemetry.pictures import raster_sheet, sample_sheet
from megasnn.telemetry.reporter import Reporter
from megasnn.telemetry.spikes import LayerSpikes, RasterRecorder, SpikeRecorder, position_in_model
from megasnn.training.startup_log import log_folder

DRAWN_SAMPLES = 8
PICTURE_LINES = 10
"""Log lines between two pictures of spikes."""


@dataclass(frozen=True)
class _Observer:
    """Observes one neuron layer."""

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
    """Measures a run's spikes, memory, time and traffic.

    Attributes:
        spikes: this rank's statistics, while `spikes.enabled`.
        rasters: this rank's firing times, while `rasters.enabled`.
    """

    def __init__(self, engine: Engine) -> None:
        self._distributed = engine.distributed
        self._state = state = engine.state
        self._timers = engine.trainer.timers
        self._counted_from = 0
        self._order = self._distributed.description.layer_names
        self.spikes = SpikeRecorder()
        self.rasters = RasterRecorder()
        for name, neuron in self._distributed.neurons():
            neuron.observer = _Observer(self.spikes, self.rasters, name)
        # A group of one rank sends nothing.
        groups = {"tp": state.tp, "cp": state.cp, "dp": state.dp_cp}
        self._groups = [name for name, group in groups.items() if group.size > 1]
        if state.pp.size > 1:
            self._groups += ["pp", "backward"]

    def since_last(self, iteration: int) -> tuple[dict[str, float], list[LayerSpikes]]:
        """Scalars since the last call, by name, and each layer's spikes in model order. Collective.

        Scalars are memory, and time and traffic per iteration.
        """
        state = self._state
        tp = state.tp.handle
        # Ranks that cut micro-batches by samples see the same neurons; by rows or tokens, each sees others of a layer.
        if self._distributed.context.context_cut == "samples":
            mine = self.spikes.reduce(state.dp_cp.handle, (tp, None))
        else:
            mine = self.spikes.reduce(state.dp.handle, (tp, state.cp.handle))
        of_stages = gather(state.pp.handle, mine)
        layers = sorted(chain(*of_stages), key=lambda layer: position_in_model(layer.name, self._order))
        peaks = gather(state.world.handle, peak_memory_mb(state.device))
        iterations = max(iteration - self._counted_from, 1)
        self._counted_from = iteration
        times = {f"time/{name}_ms": mean for name, mean in self._timers.mean_ms().items()}
        return {**memory_scalars(peaks), **times, **self._traffic(iterations)}, layers

    def _traffic(self, iterations: int) -> dict[str, float]:
        """Received MB per iteration over all ranks, by group, as sent and as if unpacked. Collective.

        "pp" counts activations between stages, "backward" their gradients. "dp" includes gradient sums over context
        parallel ranks.
        """
        received = dict[str, float]()
        for group in self._groups:
            counts = traffic.by_group[group]
            received[f"communication/{group}_mb"] = counts.bytes
            received[f"communication/{group}_mb_if_dense"] = counts.dense_bytes
        traffic.reset()
        if not received:
            return {}
        sums = sum_over_ranks(self._state.world.handle, list(received.values()))
        return {name: value / (1e6 * iterations) for name, value in zip(received, sums, strict=True)}


class StepTrace:
    """torch.profiler trace for --profile-step's iteration, on the first replica's ranks.

    A trace error does not end the run.

    Args:
        done: iterations before this run.
        iterations: the last one's number.
    """

    def __init__(
        self, config: PretrainConfig, state: ParallelState, reporter: Reporter, done: int, iterations: int
    ) -> None:
        step = config.logging.profile_step
        if step is not None and not done < step <= iterations:
            reporter.line(f"WARNING: --profile-step {step}, and the run has iterations {done + 1} to {iterations}")
        self._step = step if state.dp.rank == 0 else None
        self._reporter = reporter
        self._activities = [ProfilerActivity.CPU]
        if state.device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._path = (log_folder(config) or Path()) / "traces" / f"rank{state.rank}-{step}.pt.trace.json"

    @contextmanager
    def around(self, number: int) -> Iterator[None]:
        """Traces the block if `number` is due."""
        if number != self._step:
            yield
            return
        trace = profile(activities=self._activities)
        with self._reporter.best_effort("the trace of --profile-step"):
            trace.start()
        # No `finally`: after an error in the step there is no whole iteration to show.
        yield
        with self._reporter.best_effort("the trace of --profile-step"):
            trace.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(self._path))
            self._reporter.line(f"wrote {self._path}")


class Pictures:
    """Samples and spikes in TensorBoard."""

    def __init__(
        self, config: PretrainConfig, engine: Engine, datasets: Datasets, rasters: RasterRecorder, reporter: Reporter
    ) -> None:
        self._interval = 0  # iterations between two pictures; 0 without pictures
        if config.logging.tensorboard_dir is not None:
            self._interval = PICTURE_LINES * config.logging.log_interval
        self._reporter = reporter
        self._state = engine.state
        self._layers = engine.distributed.description.layer_names
        self._labels = datasets.train.labels
        self._rasters = rasters
        # Rank 0 draws, and gathers from the stages of its own pipeline. Other pipelines see other samples.
        self._draws = engine.state.dp_cp.rank == 0 and engine.state.tp.rank == 0
        self._shown = False

    def begin(self, batch: RankBatch, iteration: int) -> None:
        """Before a step: draws samples from the run's first batch; observes neurons if rasters are due.

        Args:
            iteration: steps done before this one.
        """
        if not self._interval:
            return
        self._rasters.enabled = self._draws and (iteration + 1) % self._interval == 0
        micro = batch.micro_batches[0]
        inputs = micro.inputs
        if isinstance(inputs, Mapping) and len(inputs) == 1 and self._labels is None:
            (inputs,) = inputs.values()  # of a data set in Python
        if not self._shown and self._state.rank == 0 and isinstance(inputs, Tensor) and inputs.ndim > 3:
            samples = list(inputs[:DRAWN_SAMPLES].cpu().numpy())
            numbers = micro.sample_ids[: len(samples)].numpy()
            if self._labels is None:
                captions = [f"sample {number}" for number in numbers]
            else:
                captions = [f"class {label}" for label in self._labels[numbers]]
            self._reporter.board.picture("samples", lambda: sample_sheet(samples, captions), iteration)
        self._shown = True

    def end(self, iteration: int) -> None:
        """After a step: draws due rasters. Collective over the pipeline.

        Args:
            iteration: steps done, this one included.
        """
        if not self._rasters.enabled:
            return
        self._rasters.enabled = False
        found = {}
        for of_stage in gather(self._state.pp.handle, self._rasters.take()):
            found.update(of_stage)
        if self._state.rank == 0 and found:
            names = sorted(found, key=lambda name: position_in_model(name, self._layers))
            rasters = {name: found[name] for name in names}
            self._reporter.board.picture("spikes/raster", lambda: raster_sheet(rasters), iteration)
