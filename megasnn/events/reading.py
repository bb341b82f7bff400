"""One way in for recordings of every format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike, fspath
from pathlib import Path

from numpy.typing import NDArray

from megasnn.events.aedat2 import decode_aedat2
from megasnn.events.aedat3 import decode_aedat3
from megasnn.events.aedat4 import read_aedat4
from megasnn.events.aedat_header import version_of
from megasnn.events.arrays import decode_arrays, decode_fields
from megasnn.events.atis import decode_atis
from megasnn.events.recording import Decoded, Recording, RecordingError, SensorSize, checked
from megasnn.files.sample_size import SAMPLE_BYTES, read_file

FORMATS = ("aedat2", "aedat3", "aedat4", "atis", "numpy")
"""AEDAT 2.0, 3.1 and 4; N-MNIST's 5 bytes an event; NumPy arrays."""

SUFFIXES = (".aedat", ".aedat4", ".bin", ".bs2", ".npz", ".npy")
"""Of files that `read_recording` recognises."""

_DECODERS: dict[str, Callable[[bytes, str, SensorSize | None], Decoded]] = {
    "aedat2": decode_aedat2,
    "aedat3": decode_aedat3,
    "atis": decode_atis,
}
_IN_MEMORY = (*_DECODERS, "numpy")
_AEDAT_VERSIONS = {"2.0": "aedat2", "3.1": "aedat3", "4.0": "aedat4"}
_HEAD_BYTES = 64


def read_recording(
    path: str | PathLike[str],
    format: str = "auto",
    sensor_size: tuple[int, int] | None = None,
    sort: bool = False,
    limit: int = SAMPLE_BYTES,
) -> Recording:
    """Reads and checks a recording.

    Args:
        path: of the file.
        format: one of `FORMATS`; auto looks at how the file begins, and at its name for N-MNIST's .bin and .bs2, which
            have nothing to recognise them by.
        sensor_size: height and width, where the file does not say it or is wrong. By default that of the header; of
            N-MNIST (34, 34) for .bin; of the DVS128 for AEDAT 2.0 without an AEChip line.
        sort: puts events in order of time instead of refusing a recording that is not: some cameras send a few late.
        limit: bytes that the file, and what it unpacks to, may have.

    Returns:
        Events in order of time, at least one, inside the sensor.

    Raises:
        RecordingError: the file is cut, empty, no plain file, too large, of another format or version, has no events,
            time that runs backwards or coordinates outside the sensor. Names the file and the event or byte.
        FileNotFoundError, PermissionError, ...: the file cannot be opened.
        ModuleNotFoundError: an AEDAT 4 file without the package that reads it (pip install megasnn[events]).
        ValueError: `format` is none of those above.
    """
    name = fspath(path)
    sensor = SensorSize(*sensor_size) if sensor_size is not None else None
    if format not in ("auto", *FORMATS):
        raise ValueError(f"unknown format {format!r}; choose from auto, {', '.join(FORMATS)}")
    try:
        data = read_file(Path(path), limit)
    except ValueError as error:
        raise RecordingError(name, str(error)) from None
    format = detect_format(data[:_HEAD_BYTES], name) if format == "auto" else format
    if format == "aedat4":
        return checked(name, read_aedat4(data, name, sensor, limit), sort)
    return decode_recording(data, name, format, sensor, sort, limit)


def decode_recording(
    data: bytes,
    name: str,
    format: str = "auto",
    sensor_size: tuple[int, int] | None = None,
    sort: bool = False,
    limit: int = SAMPLE_BYTES,
) -> Recording:
    """Like `read_recording` for bytes that are in memory already, such as a member of an archive; not for AEDAT 4.

    Raises:
        RecordingError: as above, naming `name`.
    """
    sensor = SensorSize(*sensor_size) if sensor_size is not None else None
    format = detect_format(data[:_HEAD_BYTES], name) if format == "auto" else format
    if format not in _IN_MEMORY:
        raise RecordingError(name, f"cannot be decoded in memory as {format}, only as {', '.join(_IN_MEMORY)}")
    if format == "numpy":
        return checked(name, decode_arrays(data, name, sensor, limit), sort)
    return checked(name, _DECODERS[format](data, name, sensor), sort)


def recording_of_arrays(arrays: Mapping[str, NDArray], name: str, limit: int = SAMPLE_BYTES) -> Recording:
    """The recording of a NumPy file whose arrays are read already (`megasnn.files.arrays`).

    Raises:
        RecordingError: as above, naming `name`.
    """
    return checked(name, decode_fields(arrays, name, None, limit))


def detect_format(head: bytes, name: str) -> str:
    """The format of a file that begins with `head`.

    Raises:
        RecordingError: it is none of `FORMATS`.
    """
    if not head:
        raise RecordingError(name, "is empty (0 bytes)")
    if head.startswith((b"PK\x03\x04", b"\x93NUMPY")):
        return "numpy"
    version = version_of(head)
    if version in _AEDAT_VERSIONS:
        return _AEDAT_VERSIONS[version]
    if version:
        raise RecordingError(name, f"is AEDAT {version}; versions {', '.join(_AEDAT_VERSIONS)} are read")
    if name.lower().endswith((".bin", ".bs2")):
        return "atis"
    raise RecordingError(
        name, f"is no recording of a known format (begins with {head[:12]!r}); known: {', '.join(FORMATS)}"
    )
