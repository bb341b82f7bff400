"""Event recordings in memory: four arrays and the size of the sensor, and the checks that every recording passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

LARGEST_SIDE = 1 << 16
"""Pixels that a side of a sensor may have: coordinates are 16-bit numbers."""


class RecordingError(ValueError):
    """A recording that cannot be used. The message names the file, and the event or byte."""


class SensorSize(NamedTuple):
    """Pixels of an event camera."""

    height: int
    width: int


@dataclass(frozen=True, eq=False)
class Events:
    """N events as arrays of shape [N].

    Attributes:
        t: time in microseconds, int64.
        x, y: column and row, uint16.
        p: polarity, uint8: 1 where it became brighter, 0 where darker.
    """

    t: NDArray[np.int64]
    x: NDArray[np.uint16]
    y: NDArray[np.uint16]
    p: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.t)

    def __getitem__(self, part: slice | NDArray) -> Events:
        """Events of a slice, a mask or an array of indices."""
        return Events(self.t[part], self.x[part], self.y[part], self.p[part])

    def between(self, start: int, end: int) -> Events:
        """Events with start <= t < end; they must be in order of time."""
        return self[slice(*np.searchsorted(self.t, (start, end)))]

    @staticmethod
    def make(t: ArrayLike, x: ArrayLike, y: ArrayLike, p: ArrayLike) -> Events:
        """Converts anything array-like to the types above; values must fit, nothing is checked."""
        return Events(
            np.ascontiguousarray(t, np.int64),
            np.ascontiguousarray(x, np.uint16),
            np.ascontiguousarray(y, np.uint16),
            np.ascontiguousarray(p, np.uint8),
        )


@dataclass(frozen=True, eq=False)
class Recording:
    """Events of one file and the sensor that sent them.

    Attributes:
        events: at least one, in order of time and inside the sensor once it is checked.
        sensor: height and width.
    """

    events: Events
    sensor: SensorSize


def check_recording(recording: Recording, sort: bool = False) -> Recording:
    """Checks that there are events, inside the sensor and in order of time; `sort` puts them in order instead, where
    equal times keep theirs. Raises ValueError, naming the event."""
    events, sensor = recording.events, recording.sensor
    if not len(events):
        raise ValueError("has no events")
    for axis, values, limit in (("x", events.x, sensor.width), ("y", events.y, sensor.height)):
        if values.max() >= limit:
            index = int((values >= limit).argmax())
            raise ValueError(f"{axis} = {values[index]} at event {index} is outside the sensor of {sensor}")
    backwards = events.t[1:] < events.t[:-1]
    if backwards.any():
        if not sort:
            index = int(backwards.argmax()) + 1
            raise ValueError(
                f"time runs backwards at event {index}: {events.t[index]} us comes after {events.t[index - 1]} us; "
                "sort=True (--sort-events) puts events in order"
            )
        events = events[np.argsort(events.t, kind="stable")]
    return Recording(events, sensor)
