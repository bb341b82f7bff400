"""When single neurons fire: a few of each layer, for a few samples, as a picture of neurons against time steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megasnn.telemetry.pictures import sample_sheet
from megasnn.telemetry.spikes import place_in_model

NEURONS = 32
SAMPLES = 4
_PIXELS = 4  # of a spike, high and wide
_SPIKE, _SILENCE, _BORDER = 0, 255, 160  # levels of grey

Raster = NDArray[np.bool_]
"""[samples, neurons, T]: which of the neurons fired when."""


class RasterRecorder:
    """Keeps the spikes of a few neurons from the first micro-batch that passes while it is enabled.

    Neurons are spread evenly over what this rank holds of a layer, samples are the first ones of the micro-batch.
    """

    def __init__(self) -> None:
        self.enabled = False
        self._rasters: dict[str, Tensor] = {}

    @torch.no_grad()
    def observe(self, name: str, spikes: Tensor) -> None:
        """Spikes `[T, N, C_local, ...]` of one layer; nothing happens unless enabled."""
        if not self.enabled or name in self._rasters:
            return
        few = spikes[:, :SAMPLES].flatten(2)
        chosen = torch.linspace(0, few.shape[2] - 1, min(NEURONS, few.shape[2]), device=few.device).long()
        self._rasters[name] = (few[..., chosen] != 0).permute(1, 2, 0)  # read when the step is over

    def forget(self) -> None:
        """Forgets the spikes that it keeps."""
        self._rasters.clear()

    def take(self, pipeline_group: dist.ProcessGroup | None, layers: Sequence[str]) -> dict[str, Raster]:
        """The rasters of all stages in the model's order, and forgets them; the same on every rank of the pipeline.

        Collective over the pipeline; None stands for a group of one rank.

        Args:
            layers: names of the model's layers, which those of their neurons begin with.
        """
        found = {name: raster.cpu().numpy() for name, raster in self._rasters.items()}
        self._rasters.clear()
        if pipeline_group is not None:
            stages: list[dict[str, Raster]] = [{} for _ in range(pipeline_group.size())]
            dist.all_gather_object(stages, found, group=pipeline_group)
            found = {name: raster for stage in stages for name, raster in stage.items()}
        places = {layer: place for place, layer in enumerate(layers)}
        return dict(sorted(found.items(), key=lambda item: place_in_model(item[0], places)))


def raster_picture(raster: Raster) -> NDArray[np.uint8]:
    """Black spikes on white, uint8 `[4 * neurons, 4 * (samples * (T + 1) - 1)]`: a row of 4 pixels for each neuron, a
    column for each time step, samples side by side with a grey line between them."""
    samples, neurons, time_steps = raster.shape
    picture = np.full((neurons, samples, time_steps + 1), _BORDER, np.uint8)
    picture[..., :time_steps] = np.where(raster, _SPIKE, _SILENCE).transpose(1, 0, 2)
    return picture.reshape(neurons, -1)[:, :-1].repeat(_PIXELS, 0).repeat(_PIXELS, 1)


def raster_sheet(rasters: Mapping[str, Raster]) -> NDArray[np.uint8]:
    """The rasters of all layers on a sheet, uint8 `[height, width, 3]`, with a legend above them."""
    samples, neurons, time_steps = next(iter(rasters.values())).shape
    legend = (
        f"black: a spike; rows: up to {neurons} neurons of a layer; columns: {time_steps} time steps of each of "
        f"{samples} samples, grey lines between samples"
    )
    pictures = [raster_picture(raster) for raster in rasters.values()]
    return sample_sheet(pictures, list(rasters), title=legend)
