"""Pictures for TensorBoard, drawn by matplotlib: samples and rasters of spikes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from megasnn.telemetry.spikes import Raster  # drawing a schedule needs no torch

Picture = NDArray[np.uint8]
"""[height, width, 3]"""

EVENT_LEGEND = "red: brighter, blue: darker, black: both; a frame for each time step"
DPI = 100


def to_rgb(sample: NDArray[Any]) -> Picture:
    """Converts a sample as the loader has it to uint8 `[H, W, 3]`.

    Event frames `[T, 2, H, W]` stand side by side, on white, red where it became brighter (polarity 1) and blue where
    darker; the darkest shade is the 99.5th percentile of what is not zero. Images are uint8 `[H, W]` or `[H, W, C]`, or
    floats `[C, H, W]`, which are stretched from black to white. Raises ValueError for another shape.
    """
    if sample.ndim == 4 and sample.shape[1] == 2:
        values = sample.astype(np.float32)
        seen = values[values > 0]
        shade = np.clip(values / np.percentile(seen, 99.5), 0, 1) if len(seen) else values
        darker, brighter = shade[:, 0], shade[:, 1]
        light = np.stack([1 - darker, 1 - np.maximum(darker, brighter), 1 - brighter], axis=-1)
        framed = np.pad(np.rint(255 * light), ((0, 0), (0, 0), (0, 1), (0, 0)), constant_values=160)
        return np.concatenate([*framed], axis=1).astype(np.uint8)
    if sample.dtype != np.uint8 and sample.ndim == 3:
        low, high = float(sample.min()), float(sample.max())
        sample = np.rint((sample - low) * (255 / max(high - low, 1e-12))).astype(np.uint8).transpose(1, 2, 0)
    image = sample[..., None] if sample.ndim == 2 else sample
    if image.ndim != 3 or image.shape[2] not in (1, 3):
        raise ValueError(f"a sample is an image or event frames [T, 2, H, W], not {list(sample.shape)}")
    return np.broadcast_to(image, (*image.shape[:2], 3)).astype(np.uint8)


def sample_sheet(samples: Sequence[NDArray[Any]], captions: Sequence[str]) -> Picture:
    """Draws samples with captions on a sheet: recordings one below the other, images four in a row."""
    is_events = any(sample.ndim == 4 for sample in samples)
    return _sheet([to_rgb(sample) for sample in samples], captions, EVENT_LEGEND if is_events else "", is_events)


def raster_sheet(rasters: Mapping[str, Raster]) -> Picture:
    """Draws rasters: a row of pixels for each neuron, a column for each time step, grey lines between samples."""
    samples, neurons, time_steps = next(iter(rasters.values())).shape
    legend = f"black: a spike; up to {neurons} neurons of each layer, {time_steps} steps of each of {samples} samples"
    return _sheet([raster_picture(raster) for raster in rasters.values()], list(rasters), legend)


def raster_picture(raster: Raster) -> Picture:
    """Draws one layer, uint8 `[neurons, samples * (T + 1) - 1, 3]`: 0 is a spike, 255 none, 160 a border."""
    samples, neurons, time_steps = raster.shape
    picture = np.full((neurons, samples, time_steps + 1), 160, np.uint8)
    picture[..., :time_steps] = np.where(raster, 0, 255).transpose(1, 0, 2)
    return np.repeat(picture.reshape(neurons, -1)[:, :-1, None], 3, axis=2)


def _sheet(pictures: Sequence[Picture], captions: Sequence[str], title: str, one_a_row: bool = False) -> Picture:
    from matplotlib.figure import Figure

    columns = 1 if one_a_row else min(4, len(pictures))
    rows = -(-len(pictures) // columns)
    height = 12 * pictures[0].shape[0] / pictures[0].shape[1] if one_a_row else 12 / columns
    size = 12, max(rows * (min(height, 4) + 0.3), 1.0) + 0.4
    figure = Figure(size, DPI, layout="constrained")
    figure.suptitle(title, fontsize=9)
    for position, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        axes = figure.add_subplot(rows, columns, position + 1)
        axes.imshow(picture, interpolation="nearest")
        axes.set_title(caption, fontsize=8)
        axes.axis("off")
    return pixels(figure)


def pixels(figure: Figure) -> Picture:
    """Draws a figure of matplotlib's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
