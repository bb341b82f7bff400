"""What every recording is checked for, whatever file it came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megasnn.events.events import Events, Recording, RecordingError, SensorSize

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
