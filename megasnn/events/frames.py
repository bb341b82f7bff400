"""Events to frames [T, 2, H, W]: how many events of each polarity every pixel sent in each part of a recording."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megasnn.events.recording import Events, SensorSize
from megasnn.files.sample_size import SAMPLE_BYTES, require_size

_PIXEL_BYTES = 8  # two polarities, four bytes each


@dataclass(frozen=True)
class FrameOptions:
    """How a recording becomes frames; ValueError for values that make no sense.

    Without `size` and `normalize`, frames are integer counts, exactly those of SpikingJelly 2.0.

    Attributes:
        time_steps: number of frames; None where `duration` is given.
        split_by: what the frames have equal shares of, the number of events or time; the last one also takes the
            remainder. As SpikingJelly's `integrate_events_by_fixed_frames_number`.
        duration: microseconds per frame instead of a number of frames, which then differs between recordings. As
            SpikingJelly's `integrate_events_by_fixed_duration`.
        size: height and width to scale to, e.g. 48; None keeps the sensor's.
        normalize: frame-max divides each frame by its largest count (over both polarities), before scaling.
    """

    time_steps: int | None = 10
    split_by: Literal["number", "time"] = "number"
    duration: int | None = None
    size: int | None = None
    normalize: Literal["none", "frame-max"] = "none"

    def __post_init__(self) -> None:
        if (self.time_steps is None) == (self.duration is None):
            raise ValueError(
                f"give a number of frames or their duration: time_steps {self.time_steps}, duration {self.duration} us"
            )
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
    """Frames of one recording.

    Args:
        events: in order of time, as readers give them; at least one.
        sensor: height and width.
        options: number of frames, scaling and normalisation.
        limit: bytes that the frames may take, before scaling and after.

    Returns:
        [T, 2, H, W], polarity 0 before polarity 1: int32 counts, or float32 where `options` scale or normalise.

    Raises:
        ValueError: no events, time runs backwards, an event outside the sensor, a recording too short for the number
            of frames by time, or frames that are too large.
    """
    count = options.time_steps or _number_of_frames(events.t, options)
    height, width = max(sensor, (options.size or 0,) * 2, key=math.prod)
    require_size(f"{count} frames of {height} x {width}", _PIXEL_BYTES * count * height * width, limit)
    frames: NDArray[Any] = count_events(events, sensor, frame_starts(events.t, options))
    if options.normalize == "frame-max":
        frames = normalize_frames(frames)
    if options.size is not None:
        frames = resize_frames(frames, options.size)
    return frames


def frame_starts(t: NDArray[np.int64], options: FrameOptions) -> NDArray[np.int64]:
    """Index of the first event of each frame and, as the last entry, the number of events: shape [T + 1].

    Frame i holds the events from entry i up to entry i + 1; with `split_by="time"` it covers the times from
    i * (duration // T) after the first event, empty where nothing happened (SpikingJelly raises IndexError there).

    Raises:
        ValueError: as `events_to_frames`.
    """
    if not len(t):
        raise ValueError("frames need at least one event")
    if (t[1:] < t[:-1]).any():
        raise ValueError("frames need events in order of time; time runs backwards")
    if options.duration is not None:
        starts = np.searchsorted(t, t[0] + options.duration * np.arange(_number_of_frames(t, options)))
    elif options.split_by == "number":
        assert options.time_steps is not None
        starts = len(t) // options.time_steps * np.arange(options.time_steps)
    else:
        assert options.time_steps is not None
        step = int(t[-1] - t[0]) // options.time_steps
        if step == 0:
            raise ValueError(f"a recording of {t[-1] - t[0]} us is too short for {options.time_steps} frames by time")
        starts = np.searchsorted(t, t[0] + step * np.arange(options.time_steps))
    return np.append(starts, len(t))


def _number_of_frames(t: NDArray[np.int64], options: FrameOptions) -> int:
    """Where they are given by their duration."""
    assert options.duration is not None
    # An event exactly at the end still belongs to the last frame, hence not floor + 1.
    return max(1, -(-int(t[-1] - t[0]) // options.duration)) if len(t) else 0


def count_events(events: Events, sensor: SensorSize, starts: NDArray[np.int64]) -> NDArray[np.int32]:
    """Counts [T, 2, H, W] for the frames that `starts` [T + 1] cuts the events into.

    Raises:
        ValueError: an event outside the sensor.
    """
    height, width = sensor
    if len(events) and (events.y.max() >= height or events.x.max() >= width):
        raise ValueError(f"event at y {events.y.max()}, x {events.x.max()} outside the sensor of {sensor}")
    cells = 2 * height * width
    cell = (events.p != 0).astype(np.intp) * height
    cell += events.y
    cell *= width
    cell += events.x
    # One frame at a time: its counters stay in the cache.
    frames = np.empty((len(starts) - 1, cells), np.int32)
    for frame, start, end in zip(frames, starts[:-1], starts[1:], strict=True):
        frame[:] = np.bincount(cell[start:end], minlength=cells)
    return frames.reshape(-1, 2, height, width)


def normalize_frames(frames: NDArray[Any]) -> NDArray[np.float32]:
    """Each frame [2, H, W] of [T, 2, H, W] divided by its largest value; an empty frame stays zero.

    The preparation of CIFAR10-DVS by Deng et al. 2022 (TET), which scales afterwards. (There, frames are then rounded
    to steps of 1/255 on their way through an image library; here they are not.)
    """
    largest = frames.max(axis=(1, 2, 3), keepdims=True)
    return frames.astype(np.float32) / np.maximum(largest, 1)


def resize_frames(frames: NDArray[Any], size: int) -> NDArray[np.float32]:
    """Frames [..., H, W] scaled to [..., size, size]: bilinear, each new pixel a mean over all it covers (antialiased).

    That is torchvision's `Resize`, with which the literature scales CIFAR10-DVS from 128 to 48: Deng et al. 2022 (TET)
    as images, after normalising; SpikingJelly's example of memory optimisation as tensors of plain counts (which
    torchvision antialiases since 0.17). Values are means of counts, no sums: their scale does not depend on the size.
    """
    height, width = frames.shape[-2:]
    rows, columns = _weights(height, size), _weights(width, size)
    return rows @ frames.astype(np.float32, copy=False) @ columns.T


@lru_cache(maxsize=16)
def _weights(old: int, new: int) -> NDArray[np.float32]:
    """Matrix [new, old] of the triangle filter, as wide as a new pixel when scaling down, one old pixel when up."""
    scale = old / new
    support = max(scale, 1.0)
    centers = (np.arange(new) + 0.5) * scale
    distance = np.abs(np.arange(old) + 0.5 - centers[:, None]) / support
    weights = np.maximum(1 - distance, 0)
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
