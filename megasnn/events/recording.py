"""Event recordings in memory: four arrays and the sensor they came from, and what each of them is checked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


class RecordingError(ValueError):
    """A recording that cannot be used: says which one, what is wrong, and at which event or byte.

    Attributes:
        name: the file.
        problem: what is wrong with it, and where.
    """

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(name, problem)
        self.name = name
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.name}: {self.problem}"


class SensorSize(NamedTuple):
    """Pixels of an event camera."""

    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.height} x {self.width} (height x width)"


@dataclass(frozen=True, eq=False)
class Events:
    """N events in order of time, as arrays of shape [N].

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
        """The events of a slice, a mask or an array of indices."""
        return Events(self.t[part], self.x[part], self.y[part], self.p[part])

    def between(self, start: int, end: int) -> Events:
        """The events with start <= t < end, as the label files of DVS128 Gesture cut a recording into clips."""
        return self[slice(*np.searchsorted(self.t, (start, end)))]

    @staticmethod
    def make(t: ArrayLike, x: ArrayLike, y: ArrayLike, p: ArrayLike) -> Events:
        """Events from anything array-like, converted to the types above (values must fit: nothing is checked)."""
        return Events(
            np.ascontiguousarray(t, np.int64),
            np.ascontiguousarray(x, np.uint16),
            np.ascontiguousarray(y, np.uint16),
            np.ascontiguousarray(p, np.uint8),
        )


@dataclass(frozen=True, eq=False)
class Recording:
    """Checked events of one file: at least one, in order of time, inside the sensor.

    Attributes:
        events: what the pixels sent.
        sensor: height and width.
        format: of the file, one of `FORMATS`; "simulated" where there was none.
        skipped: events in the file that no pixel sent or that are marked as invalid (triggers, frames, motion sensor).
    """

    events: Events
    sensor: SensorSize
    format: str
    skipped: int = 0


_LATEST = 1 << 61  # so that differences are 64-bit numbers


def event_number(index: int) -> str:
    """The place of an event in a file without a fixed size per event."""
    return f"event {index}"


@dataclass(frozen=True, eq=False)
class Decoded:
    """What a decoder found in a file; nothing is checked yet. As `Recording`, and:

    Attributes:
        place: describes where in the file the event with an index is.
    """

    events: Events
    sensor: SensorSize
    format: str
    skipped: int = 0
    place: Callable[[int], str] = event_number


def checked(name: str, decoded: Decoded, sort: bool = False) -> Recording:
    """The recording, if there are events, inside the sensor and in order of time.

    Args:
        name: of the file, for the message.
        sort: puts events in order of time instead of refusing those that are not; equal times keep their order.

    Raises:
        RecordingError: naming the event.
    """
    events = decoded.events
    if not len(events):
        raise RecordingError(name, "has no events")
    _check_inside(name, decoded)
    backwards = events.t[1:] < events.t[:-1]
    if backwards.any():
        if not sort:
            index = int(backwards.argmax()) + 1
            before, after = int(events.t[index - 1]), int(events.t[index])
            place = decoded.place(index)
            raise RecordingError(
                name,
                f"time runs backwards at {place}: {after} us comes after {before} us; "
                "sort=True (--sort-events) puts events in order",
            )
        events = events[np.argsort(events.t, kind="stable")]
    first, last = int(events.t[0]), int(events.t[-1])
    if max(-first, last) > _LATEST:
        raise RecordingError(name, f"has times from {first} to {last} us, which makes no sense")
    return Recording(events, decoded.sensor, decoded.format, decoded.skipped)


def _check_inside(name: str, decoded: Decoded) -> None:
    events, sensor = decoded.events, decoded.sensor
    for what, values, limit in (("x", events.x, sensor.width), ("y", events.y, sensor.height)):
        if values.max() >= limit:
            index = int((values >= limit).argmax())
            place = decoded.place(index)
            raise RecordingError(
                name, f"{what} = {values[index]} at {place} is outside the sensor of {sensor}; pass its sensor size"
            )
