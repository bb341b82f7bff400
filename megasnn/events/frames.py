"""Events to frames [T, 2, H, W]: how many events of each polarity every pixel sent in each part of a recording."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megasnn.events.recording import Events, SensorSize
from megasnn.files.sample_size import SAMPLE_BYTES, require_size


@dataclass(frozen=True)
class FrameOptions:
    """How a recording becomes frames. Without `size` and `normalize` frames are counts, bit for bit SpikingJelly's.

    Attributes:
        time_steps: number of frames; None gives as many frames of `duration` as the recording has.
        split_by: what the frames have equal shares of, the number of events or time; the last one also takes the
            remainder, as in SpikingJelly's `integrate_events_by_fixed_frames_number`.
        duration: microseconds of a frame, instead of equal shares. What comes after `time_steps` frames is left out,
            and a shorter recording is filled up with empty frames. Without `time_steps` it is SpikingJelly's
            `integrate_events_by_fixed_duration`.
        size: height and width to scale to, e.g. 48; None keeps the sensor's.
        normalize: frame-max divides each frame by its largest count (over both polarities), before scaling.

    Raises:
        ValueError: values below 1, another name, or neither a number of frames nor their duration.
    """

    time_steps: int | None = 10
    split_by: Literal["number", "time"] = "number"
    duration: int | None = None
    size: int | None = None
    normalize: Literal["none", "frame-max"] = "none"

    def __post_init__(self) -> None:
        if self.time_steps is None and self.duration is None:
            raise ValueError("give time_steps, duration or both: a number of frames, or microseconds of each")
        for name in ("time_steps", "duration", "size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name, choices in (("split_by", ("number", "time")), ("normalize", ("none", "frame-max"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")


def events_to_frames(
    events: Events, sensor: SensorSize, options: FrameOptions, limit: int = SAMPLE_BYTES
) -> NDArray[Any]:
    """Counts the events of each frame, then normalises and scales as the options say.

    Args:
        events: in order of time and inside the sensor, as readers give them; at least one.
        sensor: height and width.
        options: number of frames, scaling and normalisation.
        limit: bytes that the frames may take, before scaling and after.

    Returns:
        [T, 2, H, W], polarity 0 before polarity 1: int32 counts, or float32 where they are scaled or normalised.

    Raises:
        ValueError: no events, time that runs backwards, an event outside the sensor, a recording too short for the
            number of frames by time, or frames that are too large.
    """
    height, width = sensor
    t = events.t
    if not len(t) or (t[1:] < t[:-1]).any():
        raise ValueError("frames need at least one event, and events in order of time")
    if events.y.max() >= height or events.x.max() >= width:
        raise ValueError(f"event at y {events.y.max()}, x {events.x.max()} outside the sensor of {sensor}")
    # An event exactly at the end of a frame still belongs to the last one, hence not floor + 1.
    count = options.time_steps or max(1, -(-int(t[-1] - t[0]) // (options.duration or 1)))
    pixels = max(height * width, (options.size or 0) ** 2)
    require_size(f"{count} frames of {pixels} pixels", 8 * count * pixels, limit)  # two polarities, four bytes each

    frames: NDArray[Any] = _count(events, sensor, _bounds(t, count, options))
    if options.normalize == "frame-max":
        frames = frames.astype(np.float32) / np.maximum(frames.max(axis=(1, 2, 3), keepdims=True), 1)
    if options.size is not None and sensor != (options.size, options.size):
        frames = resize_frames(frames, options.size)
    return frames


def _bounds(t: NDArray[np.int64], count: int, options: FrameOptions) -> NDArray[np.int64]:
    """First event of each frame and, as the last entry, the end of the last frame: shape [count + 1]."""
    if options.duration is not None:
        starts = t[0] + options.duration * np.arange(count + 1)
        bounds = np.searchsorted(t, starts)
        if options.time_steps is None:
            bounds[-1] = len(t)
        return bounds
    if options.split_by == "number":
        return np.append(len(t) // count * np.arange(count), len(t))
    step = int(t[-1] - t[0]) // count
    if step == 0:
        raise ValueError(f"a recording of {t[-1] - t[0]} us is too short for {count} frames by time")
    return np.append(np.searchsorted(t, t[0] + step * np.arange(count)), len(t))


def _count(events: Events, sensor: SensorSize, bounds: NDArray[np.int64]) -> NDArray[np.int32]:
    height, width = sensor
    cells = 2 * height * width
    cell = (events.p != 0).astype(np.intp) * height
    cell += events.y
    cell *= width
    cell += events.x
    # One frame at a time: its counters stay in the cache.
    frames = np.empty((len(bounds) - 1, cells), np.int32)
    for frame, start, end in zip(frames, bounds[:-1], bounds[1:], strict=True):
        frame[:] = np.bincount(cell[start:end], minlength=cells)
    return frames.reshape(-1, 2, height, width)


def resize_frames(frames: NDArray[Any], size: int) -> NDArray[np.float32]:
    """Scales frames [..., H, W] to [..., size, size]: bilinear, each new pixel a mean over all it covers (antialiased).

    That is torchvision's `Resize`, with which the literature scales CIFAR10-DVS from 128 to 48 (Deng et al. 2022, TET).
    Values are means of counts, no sums: their scale does not depend on the size.
    """
    height, width = frames.shape[-2:]
    return _weights(height, size) @ frames.astype(np.float32, copy=False) @ _weights(width, size).T


@lru_cache(maxsize=16)
def _weights(old: int, new: int) -> NDArray[np.float32]:
    """Matrix [new, old] of the triangle filter, as wide as a new pixel when scaling down, one old pixel when up."""
    scale = old / new
    centers = (np.arange(new) + 0.5) * scale
    distance = np.abs(np.arange(old) + 0.5 - centers[:, None]) / max(scale, 1.0)
    weights = np.maximum(1 - distance, 0)
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
