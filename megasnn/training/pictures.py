"""What TensorBoard shows as pictures: samples that go in, and which neurons of each layer fire when."""

from __future__ import annotations

from collections.abc import Sequence

from megasnn.config.logging import LoggingConfig
from megasnn.data import Datasets, GlobalBatch
from megasnn.models.description import ModelDescription
from megasnn.parallel_state import ParallelState
from megasnn.telemetry.pictures import SpikeHistory, raster_sheet, sample_sheet
from megasnn.telemetry.reporter import Reporter
from megasnn.telemetry.spikes import LayerSpikes, RasterRecorder

SAMPLES = 8


class Pictures:
    """Shows samples and spikes as pictures in TensorBoard.

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
        self._draws = state.dp_cp.rank == 0 and state.tensor.rank == 0
        self._shown = False
        self._history = SpikeHistory()

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

    def add(self, iteration: int, layers: Sequence[LayerSpikes]) -> None:
        """At a log line: the spikes of all layers, for the picture of how they change."""
        if self._interval:
            self._history.add(iteration, layers)

    def end(self, iteration: int, reporter: Reporter, last: bool = False) -> None:
        """After the step, with that one counted: draws what was watched, and the layers' history.

        Args:
            last: whether the run ends here: then the history is drawn whatever the interval.
        """
        if not self._interval:
            return
        due = iteration % self._interval == 0
        if (due or last) and len(self._history):
            reporter.picture("spikes/layers", self._history.picture, iteration)
        if not self._rasters.enabled:
            return
        self._rasters.enabled = False
        rasters = self._rasters.take(self._state.pipeline.handle, self._layers)
        if self._state.rank == 0 and rasters:
            reporter.picture("spikes/raster", lambda: raster_sheet(rasters), iteration)

    def _show_samples(self, batch: GlobalBatch, iteration: int, reporter: Reporter) -> None:
        micro = batch.micro_batches[0]
        assert micro.images is not None, "the first rank is on the first stage"
        samples = list(micro.images[:SAMPLES].cpu().numpy())
        classes = self._labels[micro.sample_ids[: len(samples)].numpy()].tolist()
        captions = [f"class {label}" for label in classes]
        reporter.picture("samples", lambda: sample_sheet(samples, captions), iteration)
