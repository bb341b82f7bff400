"""Traces of steps, and pictures of a run: samples, and which neurons fire when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megasnn.config import PretrainConfig
from megasnn.data import Datasets, GlobalBatch
from megasnn.engine import Engine
from megasnn.parallel.agreement import gather
from megasnn.parallel_state import ParallelState
from megasnn.telemetry.pictures import raster_sheet, sample_sheet
from megasnn.telemetry.reporter import Reporter
from megasnn.telemetry.spikes import RasterRecorder, place_in_model
from megasnn.training.startup_log import log_folder

SAMPLES = 8


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
            samples = list(micro.inputs[:SAMPLES].cpu().numpy())
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
        rasters = {name: found[name] for name in sorted(found, key=lambda name: place_in_model(name, self._layers))}
        if self._state.rank == 0 and rasters:
            self._reporter.board.picture("spikes/raster", lambda: raster_sheet(rasters), iteration)
