"""Events as NumPy files: .npz with arrays t, x, y and p (SpikingJelly's), or .npy with one structured array.

An .npz may also hold the sensor's height and width, as the samples in shards do; SpikingJelly's files do not.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from megasnn.events.checks import Decoded
from megasnn.events.events import Events, RecordingError, SensorSize

NAMES = {
    "t": ("t", "ts", "timestamp"),
    "x": ("x",),
    "y": ("y",),
    "p": ("p", "on", "polarity"),
}
ARRAY_FILE_ERRORS = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    NotImplementedError,  # a damaged version or compression in a zip file
    RuntimeError,  # a damaged flag, which says that it is encrypted
    zipfile.BadZipFile,
    zlib.error,
)
"""What NumPy raises for a damaged .npz or .npy."""


def decode_arrays(data: bytes, name: str, sensor: SensorSize | None = None) -> Decoded:
    """Decodes the bytes of an .npz or .npy file.

    Fields may be called t, ts or timestamp; x; y; p, on or polarity. Polarity is 0 or 1, or -1 or 1.

    Args:
        data: the whole file.
        name: of the file, for messages.
        sensor: by default what the file says.

    Raises:
        RecordingError: cut, empty, fields missing, of unequal length or not integers, values that the types of `Events`
            cannot hold, or no sensor size.
    """
    loaded = _load(data, name)
    fields = {field: _field(loaded, field, name) for field in NAMES}
    lengths = {field: values.shape for field, values in fields.items()}
    if len(set(lengths.values())) > 1 or fields["t"].ndim != 1:
        raise RecordingError(name, f"needs arrays of one dimension and equal length, has {lengths}")
    sensor = sensor or _sensor_of(loaded, name)
    for field in ("x", "y"):
        _refuse(name, field, fields[field], fields[field] < 0, "is outside the sensor")
        _refuse(name, field, fields[field], fields[field] > np.iinfo(np.uint16).max, "is outside the sensor")
    _refuse(name, "p", fields["p"], ~np.isin(fields["p"], (-1, 0, 1)), "is no polarity: 0 or 1, or -1 or 1")
    events = Events.make(fields["t"], fields["x"], fields["y"], fields["p"] > 0)
    return Decoded(events, sensor, "numpy")


def _load(data: bytes, name: str) -> Mapping[str, np.ndarray]:
    """The arrays by name; of a structured array, its fields."""
    try:
        loaded: Any = np.load(io.BytesIO(data), allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {field: loaded[field] for field in loaded.dtype.names or ()}
        with loaded:
            return {field: loaded[field] for field in loaded.files}
    except ARRAY_FILE_ERRORS as error:
        raise RecordingError(name, f"cannot be read as a NumPy file of {len(data)} bytes ({error})") from error


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
    return SensorSize(int(loaded["height"]), int(loaded["width"]))


def _refuse(name: str, field: str, values: np.ndarray, wrong: np.ndarray, why: str) -> None:
    if wrong.any():
        index = int(wrong.argmax())
        raise RecordingError(name, f"{field} = {values[index]} at event {index} {why}")
