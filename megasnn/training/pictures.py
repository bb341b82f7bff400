"""What TensorBoard shows as pictures: samples that go in, and which neurons of each layer fire when."""

from __future__ import annotations

from megasnn.config.logging import LoggingConfig
from megasnn.data import Datasets, GlobalBatch
from megasnn.models.description import ModelDescription
from megasnn.parallel_state import ParallelState
from megasnn.telemetry.pictures import sample_sheet
from megasnn.telemetry.rasters import RasterRecorder, raster_picture
from megasnn.telemetry.reporter import Reporter

SAMPLES = 8


class Pictures:
    """
    Args:
        rasters: fed by this rank's neurons.
    """

    def __init__(
        self,
        options: LoggingConfig,
        model: ModelDescription,
        datasets: Datasets,
        state: ParallelState,
        rasters: RasterRecorder,
    ) -> None:
        self._interval = options.picture_interval
        self._layers = [layer.name for layer in model.layers]
        self._labels, self._state, self._rasters = datasets.train.labels, state, rasters
        # The pipeline of the rank that writes; its other stages send theirs.
        self._draws = state.data.rank == 0 and state.tensor.rank == 0
        self._shown = False

    def begin(self, batch: GlobalBatch, iteration: int, reporter: Reporter) -> None:
        """Before a step: shows samples of the run's first batch, and lets the neurons be watched where it is due.

        Args:
            iteration: steps done before this one.
        """
        if not self._interval:
            return
        self._rasters.enabled = self._draws and (iteration + 1) % self._interval == 0
        if not self._shown and self._state.rank == 0:
            self._show_samples(batch, iteration, reporter)
        self._shown = True

    def end(self, iteration: int, reporter: Reporter) -> None:
        """After the step, with that one counted: draws what was watched."""
        if not self._rasters.enabled:
            return
        self._rasters.enabled = False
        rasters = self._rasters.take(self._state.pipeline.handle, self._layers)
        if self._state.rank == 0 and rasters:
            pictures = [raster_picture(raster) for raster in rasters.values()]
            reporter.picture("spikes/raster", sample_sheet(pictures, list(rasters)), iteration)

    def _show_samples(self, batch: GlobalBatch, iteration: int, reporter: Reporter) -> None:
        micro = batch.micro_batches[0]
        assert micro.images is not None, "the first rank is on the first stage"
        samples = list(micro.images[:SAMPLES].numpy())
        classes = self._labels[micro.sample_ids[: len(samples)].numpy()].tolist()
        sheet = sample_sheet(samples, [f"class {label}" for label in classes])
        reporter.picture("samples", sheet, iteration)
