"""Pictures for TensorBoard, drawn with matplotlib: samples and spike rasters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    # Imports torch, which drawing a schedule does not need.
    from megasnn.telemetry.spikes import Raster

Picture = NDArray[np.uint8]
"""uint8 `[height, width, 3]`."""

EVENT_LEGEND = "red: brighter, blue: darker, black: both; a frame for each time step"
BORDER_GREY = 160
DPI = 100


def to_rgb(sample: NDArray[Any]) -> Picture:
    """Converts to uint8 `[H, W, 3]`.

    Args:
        sample: event frames `[T, 2, H, W]`, drawn side by side; or an image, uint8 `[H, W]` or `[H, W, C]`, or floats
            `[C, H, W]`, stretched from black to white.

    Raises ValueError for another shape.
    """
    if sample.ndim == 4 and sample.shape[1] == 2:
        return _frames_to_rgb(sample.astype(np.float32))
    if sample.dtype != np.uint8 and sample.ndim == 3:
        low = float(sample.min())
        high = float(sample.max())
        sample = np.rint((sample - low) * (255 / max(high - low, 1e-12))).astype(np.uint8).transpose(1, 2, 0)
    image = sample[..., None] if sample.ndim == 2 else sample
    if image.ndim != 3 or image.shape[2] not in (1, 3):
        raise ValueError(f"a sample is an image or event frames [T, 2, H, W], not {list(sample.shape)}")
    return np.broadcast_to(image, (*image.shape[:2], 3)).astype(np.uint8)


def _frames_to_rgb(frames: NDArray[np.float32]) -> Picture:
    """`[T, 2, H, W]` side by side on white: polarity 1 (brighter) red, polarity 0 (darker) blue."""
    positive = frames[frames > 0]
    shade = frames
    if len(positive):
        # Counts have a long tail: the full colour stands for the 99.5th percentile, not for the largest count.
        shade = np.clip(frames / np.percentile(positive, 99.5), 0, 1)
    darker, brighter = shade[:, 0], shade[:, 1]
    light = np.stack([1 - darker, 1 - np.maximum(darker, brighter), 1 - brighter], axis=-1)
    right_border = ((0, 0), (0, 0), (0, 1), (0, 0))
    bordered = np.pad(np.rint(255 * light), right_border, constant_values=BORDER_GREY)
    return np.concatenate([*bordered], axis=1).astype(np.uint8)


def sample_sheet(samples: Sequence[NDArray[Any]], captions: Sequence[str]) -> Picture:
    """Event frames one sample a row, images four a row."""
    has_frames = any(sample.ndim == 4 for sample in samples)
    title = EVENT_LEGEND if has_frames else ""
    return _sheet([to_rgb(sample) for sample in samples], captions, title, one_a_row=has_frames)


def raster_sheet(rasters: Mapping[str, Raster]) -> Picture:
    """A row of pixels for each neuron, a column for each time step, grey between samples."""
    samples, neurons, time_steps = next(iter(rasters.values())).shape
    legend = f"black: a spike; up to {neurons} neurons of each layer, {time_steps} steps of each of {samples} samples"
    pictures = [raster_picture(raster) for raster in rasters.values()]
    return _sheet(pictures, list(rasters), legend)


def raster_picture(raster: Raster) -> Picture:
    """`[neurons, samples * (T + 1) - 1, 3]`: spikes black, borders grey, the rest white."""
    samples, neurons, time_steps = raster.shape
    picture = np.full((neurons, samples, time_steps + 1), BORDER_GREY, np.uint8)
    picture[..., :time_steps] = np.where(raster, 0, 255).transpose(1, 0, 2)
    return np.repeat(picture.reshape(neurons, -1)[:, :-1, None], 3, axis=2)


def _sheet(pictures: Sequence[Picture], captions: Sequence[str], title: str, one_a_row: bool = False) -> Picture:
    from matplotlib.figure import Figure  # most runs draw nothing

    width = 12.0  # inches, as all sizes here
    if one_a_row:
        columns = 1
        height = width * pictures[0].shape[0] / pictures[0].shape[1]
    else:
        columns = min(4, len(pictures))
        height = width / columns
    rows = math.ceil(len(pictures) / columns)
    with_captions = rows * (min(height, 4) + 0.3)
    figure = Figure((width, max(with_captions, 1.0) + 0.4), DPI, layout="constrained")
    figure.suptitle(title, fontsize=9)
    for position, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        axes = figure.add_subplot(rows, columns, position + 1)
        axes.imshow(picture, interpolation="nearest")
        axes.set_title(caption, fontsize=8)
        axes.axis("off")
    return pixels(figure)


def pixels(figure: Figure) -> Picture:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
