"""Events as NumPy files: .npz with arrays t, x, y and p (SpikingJelly's), or .npy with one structured array.

An .npz may also hold the sensor's height and width, as the samples in shards do; SpikingJelly's files do not.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megasnn.events.recording import Decoded, Events, RecordingError, SensorSize
from megasnn.files.arrays import read_arrays
from megasnn.files.sample_size import SAMPLE_BYTES, too_large

NAMES = {
    "t": ("t", "ts", "timestamp"),
    "x": ("x",),
    "y": ("y",),
    "p": ("p", "on", "polarity"),
}
LARGEST_SIDE = 1 << 16
"""Pixels that a side of a sensor may have: coordinates are 16-bit numbers."""
EVENT_BYTES = 13
"""Of an event in memory, see `Events`."""


def decode_arrays(data: bytes, name: str, sensor: SensorSize | None = None, limit: int = SAMPLE_BYTES) -> Decoded:
    """Decodes the bytes of an .npz or .npy file.

    Fields may be called t, ts or timestamp; x; y; p, on or polarity. Polarity is 0 or 1, or -1 or 1.

    Args:
        data: the whole file.
        name: of the file, for messages.
        sensor: by default what the file says.
        limit: bytes that it may take in memory.

    Raises:
        RecordingError: cut, empty, too large, fields missing, of unequal length or not integers, values that the types
            of `Events` cannot hold, or no sensor size.
    """
    try:
        loaded = read_arrays(data, limit)
    except ValueError as error:
        raise RecordingError(name, f"cannot be read: {error}") from error
    return decode_fields(loaded, name, sensor, limit)


def decode_fields(
    loaded: Mapping[str, np.ndarray], name: str, sensor: SensorSize | None = None, limit: int = SAMPLE_BYTES
) -> Decoded:
    """The same from arrays that are read already."""
    fields = {field: _field(loaded, field, name) for field in NAMES}
    lengths = {field: values.shape for field, values in fields.items()}
    if len(set(lengths.values())) > 1 or fields["t"].ndim != 1:
        raise RecordingError(name, f"needs arrays of one dimension and equal length, has {lengths}")
    if problem := too_large(f"{len(fields['t'])} events", EVENT_BYTES * len(fields["t"]), limit):
        raise RecordingError(name, problem)
    sensor = sensor or _sensor_of(loaded, name)
    for field in ("x", "y"):
        _refuse(name, field, fields[field], fields[field] < 0, "is outside the sensor")
        _refuse(name, field, fields[field], fields[field] > np.iinfo(np.uint16).max, "is outside the sensor")
    _refuse(name, "p", fields["p"], (fields["p"] < -1) | (fields["p"] > 1), "is no polarity: 0 or 1, or -1 or 1")
    if fields["t"].dtype.kind == "u":
        _refuse(name, "t", fields["t"], fields["t"] > np.iinfo(np.int64).max, "is no time in microseconds")
    events = Events.make(fields["t"], fields["x"], fields["y"], fields["p"] > 0)
    return Decoded(events, sensor, "numpy")


def _field(loaded: Mapping[str, np.ndarray], field: str, name: str) -> np.ndarray:
    found = next((loaded[alias] for alias in NAMES[field] if alias in loaded), None)
    if found is None:
        raise RecordingError(name, f"has no array {' or '.join(NAMES[field])}; it has {', '.join(loaded) or 'none'}")
    if found.dtype.kind not in "iub":
        raise RecordingError(name, f"{field} must be integers (time in microseconds), it is {found.dtype}")
    return found


def _sensor_of(loaded: Mapping[str, np.ndarray], name: str) -> SensorSize:
    if "height" not in loaded or "width" not in loaded:
        raise RecordingError(name, "does not say the size of its sensor (height and width); pass its sensor size")
    sides = [loaded[side] for side in ("height", "width")]
    if any(side.dtype.kind not in "iu" or side.size != 1 or not 1 <= side.item() <= LARGEST_SIDE for side in sides):
        found = " x ".join(str(side.item()) if side.size == 1 else f"array {side.shape}" for side in sides)
        raise RecordingError(name, f"has a sensor of {found}: height and width are numbers from 1 to {LARGEST_SIDE}")
    return SensorSize(*(int(side.item()) for side in sides))


def _refuse(name: str, field: str, values: np.ndarray, wrong: np.ndarray, why: str) -> None:
    if wrong.any():
        index = int(wrong.argmax())
        raise RecordingError(name, f"{field} = {values[index]} at event {index} {why}")
