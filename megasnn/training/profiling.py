"""Traces of steps, and pictures of a run: samples, and which neurons fire when."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
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
    """Traces the iterations of --profile-steps on the ranks of the first replica. An error in it ends no run.

    Args:
        span: iterations that were done before, and those of the whole run.
    """

    def __init__(self, config: PretrainConfig, state: ParallelState, span: tuple[int, int], reporter: Reporter) -> None:
        options, (done, iterations) = config.logging, span
        steps = options.profiled_steps
        if steps and not done < steps[-1] <= iterations:
            reporter.line(
                f"WARNING: --profile-steps {options.profile_steps}, and the run has iterations {done + 1} to "
                f"{iterations}: the trace has what lies in both"
            )
        self._reporter, self._number, self._rank = reporter, done, state.rank
        self._steps = range(max(steps[0], done + 1), steps[-1] + 1) if steps else steps
        self._folder = (log_folder(config) or Path()) / "traces"
        self._profile: profile | None = None
        if self._steps and state.dp.rank == 0:
            gpu = [ProfilerActivity.CUDA] if state.device.type == "cuda" else []
            with warnings.catch_warnings(action="ignore"):  # it would have steps of warm-up
                wait, active = self._steps[0] - done - 1, len(self._steps)
                due = torch.profiler.schedule(wait=wait, warmup=0, active=active, repeat=1)
            self._profile = profile(activities=[ProfilerActivity.CPU, *gpu], schedule=due, on_trace_ready=self._write)
            self._try(self._profile.start)

    def step(self) -> None:
        """Ends an iteration; the trace is written behind the last one."""
        self._number += 1
        if self._profile is not None:
            self._try(self._profile.step)

    def close(self) -> None:
        """Writes what there is of a trace that is being taken."""
        if self._profile is not None:
            self._try(self._profile.stop)

    def _try(self, act: Callable[[], object]) -> None:
        with self._reporter.best_effort("the trace of --profile-steps"):
            act()

    def _write(self, trace: profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank{self._rank}-{self._steps[0]}-{self._number}.pt.trace.json"
        trace.export_chrome_trace(str(path))
        self._reporter.line(f"wrote {path}")


class Pictures:
    """Shows samples and spikes as pictures in TensorBoard.

    Args:
        rasters: filled by this rank's neurons.
    """

    def __init__(
        self, config: PretrainConfig, engine: Engine, datasets: Datasets, rasters: RasterRecorder, reporter: Reporter
    ) -> None:
        self._interval, self._reporter, self._state = config.logging.picture_interval, reporter, engine.state
        self._layers = [layer.name for layer in engine.distributed.model.layers]
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
        if not self._shown and self._state.rank == 0:
            micro = batch.micro_batches[0]
            assert micro.images is not None, "the first rank is on the first stage"
            samples = list(micro.images[:SAMPLES].cpu().numpy())
            classes = self._labels[micro.sample_ids[: len(samples)].numpy()].tolist()
            captions = [f"class {label}" for label in classes]
            self._reporter.picture("samples", lambda: sample_sheet(samples, captions), iteration)
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
            self._reporter.picture("spikes/raster", lambda: raster_sheet(rasters), iteration)
