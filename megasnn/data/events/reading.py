"""Reads and checks event recordings: AEDAT, DAT, EVT, N-MNIST and NumPy files.

AEDAT 4 requires faery (``pip install megasnn[events]``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np

from megasnn.common.files import MissingPackageError, read_arrays, read_file, require_size
from megasnn.data.events.aedat import decode_aedat2, decode_aedat3
from megasnn.data.events.arrays import TimeUnit, recording_of_arrays
from megasnn.data.events.dat import decode_dat
from megasnn.data.events.evt import decode_evt
from megasnn.data.events.frames import EVENT_BYTES, Events, Recording, RecordingError, SensorSize, check_recording

RECORDING_SUFFIXES = (".aedat", ".aedat4", ".bin", ".bs2", ".npz", ".npy", ".dat", ".raw")
"""Endings of files for `read_recording`."""
N_MNIST = SensorSize(34, 34)
_OVERFLOW_ROW = 240  # outside every sensor of this format
_OVERFLOW_TIME = 1 << 13  # us

_AEDAT4 = b"#!AER-DAT4.0\r\n"
_NUMPY = (b"PK\x03\x04", b"\x93NUMPY")


def read_recording(
    path: str | PathLike[str],
    sensor_size: tuple[int, int] | None = None,
    sort: bool = False,
    time_unit: TimeUnit | None = None,
    transpose_dvs128: bool = False,
) -> Recording:
    """Reads and checks a recording. Its first bytes show the format; for .bin, .bs2, .dat and .raw, its name.

    Args:
        sensor_size: height and width, for files without them. By default (34, 34) for .bin and .bs2, a DVS128 for AEDAT
            2.0.
        sort: sort events by time; otherwise late ones are refused.
        time_unit: of t in NumPy files: s, ms, us or ns; by default whole microseconds.
        transpose_dvs128: swap a DVS128's x and y in AEDAT 2.0, as SpikingJelly does.

    Raises:
        RecordingError: damaged, too large, an unknown format or version, no events, time that runs backwards, or
            coordinates outside the sensor.
        OSError: the file cannot be opened.
        MissingPackageError: AEDAT 4 without faery.
    """
    name = fspath(path)
    sensor = SensorSize(*sensor_size) if sensor_size is not None else None
    try:
        data = read_file(Path(path))
        if data.startswith(_NUMPY):
            recording = recording_of_arrays(read_arrays(data), sensor, time_unit)
        elif time_unit is not None:
            raise ValueError("has times in microseconds; --time-unit is for .npz and .npy files")
        elif data.startswith(b"#!AER-DAT2.0"):
            recording = decode_aedat2(data, sensor, transpose_dvs128)
        else:
            recording = _decode(data, name, sensor)
        return check_recording(recording, sort)
    except ValueError as error:
        raise RecordingError(f"{name}: {error}") from error


def _decode(data: bytes, name: str, sensor: SensorSize | None) -> Recording:
    if data.startswith(b"#!AER-DAT3.1"):
        return decode_aedat3(data, sensor)
    if data.startswith(_AEDAT4):
        return _read_aedat4(data, name)
    # These formats have no mark at their beginning.
    suffix = Path(name).suffix.lower()
    if data and suffix in (".bin", ".bs2"):
        return _decode_n_mnist(data, sensor)
    if data and suffix == ".dat":
        return decode_dat(data, sensor)
    if data and suffix == ".raw":
        return decode_evt(data, sensor)
    raise ValueError(
        f"is no recording of a known format (begins with {data[:12]!r}); known are AEDAT 2.0, 3.1 and 4, DAT, EVT, "
        "N-MNIST, .npz and .npy"
    )


def _decode_n_mnist(data: bytes, sensor: SensorSize | None) -> Recording:
    """Decodes N-MNIST and N-Caltech101 (Orchard et al. 2015)."""
    if len(data) % 5:
        raise ValueError(f"is cut: {len(data)} bytes are no multiple of an event's 5 bytes")
    # x 8 bits, y 8, polarity 1, time 23, big-endian.
    raw = np.frombuffer(data, np.dtype([("x", "u1"), ("y", "u1"), ("high", "u1"), ("low", ">u2")]))
    overflows = raw["y"] == _OVERFLOW_ROW
    t = (raw["high"] & np.int64(0x7F)) << 16 | raw["low"]
    t += np.cumsum(overflows) * _OVERFLOW_TIME  # as in the authors' reader
    events = Events.make(t, raw["x"], raw["y"], raw["high"] >> 7)[~overflows]
    return Recording(events, sensor or N_MNIST)


def _read_aedat4(data: bytes, path: str) -> Recording:
    """The only event stream of an AEDAT 4 file."""
    # Checked before faery 0.7.1 reads it: a damaged header can end the process.
    (length,) = struct.unpack_from("<I", data.ljust(len(_AEDAT4) + 4, b"\0"), len(_AEDAT4))
    header = data[len(_AEDAT4) + 4 :][:length]
    header.partition(b"<")[2].rpartition(b">")[0].decode()
    with _faery(path) as faery, faery.aedat.Decoder(path) as decoder:
        tracks = [track for track in decoder.tracks() if track.data_type == "events"]
        if len(tracks) != 1:
            raise ValueError(f"has {len(tracks)} event streams; exactly one can be read")
        width, height = tracks[0].dimensions
        parts = [Events.make([], [], [], [])]
        size = 0
        for track, packet in decoder:
            if track.id == tracks[0].id:
                size += EVENT_BYTES * len(packet)
                require_size("its events", size)
                parts.append(Events.make(packet["t"], packet["x"], packet["y"], packet["on"]))
    t = np.concatenate([part.t for part in parts])
    x = np.concatenate([part.x for part in parts])
    y = np.concatenate([part.y for part in parts])
    p = np.concatenate([part.p for part in parts])
    return Recording(Events(t, x, y, p), SensorSize(height, width))


@contextmanager
def _faery(path: str) -> Iterator[Any]:
    """Module faery, whose errors about a file become ValueErrors."""
    try:
        import faery
    except ModuleNotFoundError as error:
        raise MissingPackageError(f"{path}: AEDAT 4 requires faery: pip install megasnn[events]") from error
    try:
        yield faery
    except BaseException as error:
        # A panic in Rust is no Exception, and its class cannot be imported.
        if isinstance(error, RuntimeError) or type(error).__name__ == "PanicException":
            raise ValueError(f"cannot be decoded ({error})") from error
        raise
