"""Event recordings in memory, their checks, and their frames [T, 2, H, W]: counts per polarity and pixel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megasnn.common.files import quantity, require_size

LARGEST_SIDE = 1 << 16
"""Largest height or width of a sensor: coordinates are 16-bit numbers."""
EVENT_BYTES = 13
"""Memory of an event in `Events`."""
NO_SIZE = "does not contain the size of its sensor; give it (--sensor-size HEIGHT WIDTH)"
"""Message for a file without a size."""


class RecordingError(ValueError):
    """An unusable recording. The message names file and event or byte."""


class SensorSize(NamedTuple):
    """Pixels of an event camera."""

    height: int
    width: int


@dataclass(frozen=True, eq=False)
class Events:
    """N events as arrays [N].

    Attributes:
        t: time in microseconds, int64.
        x, y: column and row, uint16.
        p: polarity, uint8: 1 for brighter, 0 for darker.
    """

    t: NDArray[np.int64]
    x: NDArray[np.uint16]
    y: NDArray[np.uint16]
    p: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.t)

    def __getitem__(self, part: slice | NDArray) -> Events:
        """Selects by a slice, a mask or indices."""
        return Events(self.t[part], self.x[part], self.y[part], self.p[part])

    def between(self, start: int, end: int) -> Events:
        """Events with start <= t < end; requires sorted times."""
        return self[slice(*np.searchsorted(self.t, (start, end)))]

    @staticmethod
    def make(t: ArrayLike, x: ArrayLike, y: ArrayLike, p: ArrayLike) -> Events:
        """Converts array-likes to the types above, unchecked."""
        return Events(
            np.ascontiguousarray(t, np.int64),
            np.ascontiguousarray(x, np.uint16),
            np.ascontiguousarray(y, np.uint16),
            np.ascontiguousarray(p, np.uint8),
        )


@dataclass(frozen=True, eq=False)
class Recording:
    """Events and their sensor's size; `check_recording` checks them."""

    events: Events
    sensor: SensorSize


def check_recording(recording: Recording, sort: bool = False) -> Recording:
    """Requires events inside the sensor and in order of time, or sorts them. Raises ValueError naming the event."""
    events = recording.events
    sensor = recording.sensor
    if not len(events):
        raise ValueError("has no events")
    for axis, values, limit in (("x", events.x, sensor.width), ("y", events.y, sensor.height)):
        if values.max() >= limit:
            index = int((values >= limit).argmax())
            raise ValueError(
                f"{axis} = {values[index]} at event {index} is outside the sensor of {sensor}; "
                "--sensor-size HEIGHT WIDTH sets another size"
            )
    backwards = events.t[1:] < events.t[:-1]
    if backwards.any():
        if not sort:
            index = int(backwards.argmax()) + 1
            raise ValueError(
                f"time runs backwards at event {index}: {events.t[index]} us comes after {events.t[index - 1]} us; "
                "sort=True (--sort-events) sorts them"
            )
        events = events[np.argsort(events.t, kind="stable")]
    return Recording(events, sensor)


@dataclass(frozen=True)
class FrameOptions:
    """Options for frames; unscaled ones are SpikingJelly's counts."""

    time_steps: int = 10
    """Frames per sample, T."""
    split_by: Literal["number", "time"] = "number"
    """Frames with equal numbers of events (number), or of equal duration (time)."""
    size: int | None = None
    """Height and width of scaled frames (usually 48 for CIFAR10-DVS); by default the sensor's."""

    def __post_init__(self) -> None:
        for name in ("time_steps", "size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.split_by not in ("number", "time"):
            raise ValueError(f"--split-by must be number or time, got {self.split_by!r}")


def make_frames(recording: Recording, options: FrameOptions) -> NDArray[Any]:
    """Frames [T, 2, H, W] from a checked recording, polarity 0 first: int32 counts, or float32 once scaled.

    Raises:
        ValueError: too short to split by time, or frames too large.
    """
    sensor = recording.sensor
    count = options.time_steps
    size = options.size
    pixels = max(sensor.height * sensor.width, (size or 0) ** 2)
    require_size(f"{count} frames of {pixels} pixels", 8 * count * pixels)  # two polarities, four bytes each
    frames: NDArray[Any] = _count(recording.events, sensor, _bounds(recording.events.t, options))
    if size is not None and sensor != (size, size):
        frames = resize_frames(frames, size)
    return frames


def _bounds(t: NDArray[np.int64], options: FrameOptions) -> NDArray[np.int64]:
    """First event in each frame, then the last frame's end: [T + 1]."""
    # The last frame includes the remainder, as in SpikingJelly's `integrate_events_by_fixed_frames_number`.
    count = options.time_steps
    if options.split_by == "number":
        return np.append(len(t) // count * np.arange(count), len(t))
    step = int(t[-1] - t[0]) // count
    if step == 0:
        raise ValueError(
            f"a recording of {t[-1] - t[0]} us is too short for {quantity(count, 'frame')} of equal duration; lower "
            "--time-steps, or use --split-by number"
        )
    return np.append(np.searchsorted(t, t[0] + step * np.arange(count)), len(t))


def _count(events: Events, sensor: SensorSize, bounds: NDArray[np.int64]) -> NDArray[np.int32]:
    height, width = sensor
    cells = 2 * height * width
    # Index of [polarity, row, column] in a flat frame, in place: a recording may have 10^7 events.
    cell = (events.p != 0).astype(np.intp) * height
    cell += events.y
    cell *= width
    cell += events.x
    # One frame at a time, so that its counters stay in the CPU's cache.
    frames = np.empty((len(bounds) - 1, cells), np.int32)
    for frame, start, end in zip(frames, bounds[:-1], bounds[1:], strict=True):
        frame[:] = np.bincount(cell[start:end], minlength=cells)
    return frames.reshape(-1, 2, height, width)


def resize_frames(frames: NDArray[Any], size: int) -> NDArray[np.float32]:
    """Scales frames [..., H, W] to [..., size, size]: bilinear, antialiased; means of counts, not sums."""
    # torchvision's `Resize`, with which the literature scales CIFAR10-DVS from 128 to 48 (Deng et al. 2022, TET).
    height, width = frames.shape[-2:]
    return _weights(height, size) @ frames.astype(np.float32, copy=False) @ _weights(width, size).T


@lru_cache(maxsize=16)
def _weights(old: int, new: int) -> NDArray[np.float32]:
    """Triangle filter [new, old], as wide as the larger pixel."""
    scale = old / new
    centers = (np.arange(new) + 0.5) * scale
    distance = np.abs(np.arange(old) + 0.5 - centers[:, None]) / max(scale, 1.0)
    weights = np.maximum(1 - distance, 0)
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
