"""Event recordings in memory: four arrays and the sensor they came from; and what is wrong with unusable ones."""

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


def event_number(index: int) -> str:
    """The place of an event in a file without a fixed size per event."""
    return f"event {index}"


def check_events(name: str, events: Events, sensor: SensorSize, place: Callable[[int], str] = event_number) -> None:
    """Raises RecordingError unless there are events, in order of time and inside the sensor.

    Args:
        name: the file, for the message.
        place: describes where in the file the event with an index is.
    """
    if not len(events):
        raise RecordingError(name, "has no events")
    backwards = events.t[1:] < events.t[:-1]
    if backwards.any():
        index = int(backwards.argmax()) + 1
        before, after = int(events.t[index - 1]), int(events.t[index])
        raise RecordingError(name, f"time runs backwards at {place(index)}: {after} us comes after {before} us")
    for what, values, limit in (("x", events.x, sensor.width), ("y", events.y, sensor.height)):
        if values.max() >= limit:
            index = int((values >= limit).argmax())
            raise RecordingError(
                name,
                f"{what} = {values[index]} at {place(index)} is outside the sensor of {sensor}; pass its sensor size",
            )
