"""Reads recordings of event cameras: AEDAT, DAT, EVT, N-MNIST and NumPy's files, checked.

AEDAT 4 is read by faery, which is optional (``pip install megasnn[events]``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np

from megasnn.common.files import read_arrays, read_file, require_size
from megasnn.data.events.aedat import decode_aedat2, decode_aedat3
from megasnn.data.events.arrays import TimeUnit, recording_of_arrays
from megasnn.data.events.dat import decode_dat
from megasnn.data.events.evt import decode_evt
from megasnn.data.events.frames import EVENT_BYTES, Events, Recording, RecordingError, SensorSize, check_recording

RECORDING_SUFFIXES = (".aedat", ".aedat4", ".bin", ".bs2", ".npz", ".npy", ".dat", ".raw")
"""Endings of the files that `read_recording` recognises."""

N_MNIST = SensorSize(34, 34)
_OVERFLOW_ROW = 240  # a row that no such sensor has
_OVERFLOW_TIME = 1 << 13

_AEDAT4 = b"#!AER-DAT4.0\r\n"
_NUMPY = (b"PK\x03\x04", b"\x93NUMPY")


def read_recording(
    path: str | PathLike[str],
    sensor_size: tuple[int, int] | None = None,
    sort: bool = False,
    time_unit: TimeUnit | None = None,
    transpose_dvs128: bool = False,
) -> Recording:
    """Reads and checks a recording; its format follows from how it begins, for .bin, .bs2, .dat, .raw from its name.

    Args:
        sensor_size: height and width, for files that do not say it. Without it .bin and .bs2 have N-MNIST's (34, 34),
            and AEDAT 2.0 without an AEChip line is a DVS128's.
        sort: puts events in order of time instead of refusing a recording that is not: some cameras send a few late.
        time_unit: of t in NumPy's files: s, ms, us or ns. Without it t must be whole numbers, of microseconds.
        transpose_dvs128: gives x and y of a DVS128 in AEDAT 2.0 as SpikingJelly's reader of CIFAR10-DVS.

    Raises:
        RecordingError: the file is cut, empty, no regular file, too large, of another format or version, has no events,
            time that runs backwards or coordinates outside the sensor. Names the file and the event or byte.
        OSError: the file cannot be opened.
        ModuleNotFoundError: AEDAT 4 without faery.
    """
    name = fspath(path)
    sensor = SensorSize(*sensor_size) if sensor_size is not None else None
    try:
        data = read_file(Path(path))
        if data.startswith(_NUMPY):
            recording = recording_of_arrays(read_arrays(data), sensor, time_unit)
        elif time_unit is not None:
            raise ValueError("is of a format that has microseconds; --time-unit is for .npz and .npy files")
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
    suffix = Path(name).suffix.lower()
    if data and suffix in (".bin", ".bs2"):
        return _decode_n_mnist(data, sensor)
    if data and suffix == ".dat":
        return decode_dat(data, sensor)
    if data and suffix == ".raw":
        return decode_evt(data, sensor)
    raise ValueError(
        f"is no recording of a known format (begins with {data[:12]!r}); AEDAT 2.0, 3.1 and 4, DAT, EVT, N-MNIST and "
        ".npz and .npy files are read"
    )


def _decode_n_mnist(data: bytes, sensor: SensorSize | None) -> Recording:
    """5 bytes an event, big-endian: x 8 bits, y 8, polarity 1, time 23 (N-MNIST, N-Caltech101; Orchard et al. 2015).

    Row 240 marks an overflow of the time: everything behind it is 2^13 us later, as in the data set's own reader.
    """
    if len(data) % 5:
        raise ValueError(f"is cut: {len(data)} bytes are no multiple of 5, the bytes of an event")
    raw = np.frombuffer(data, np.dtype([("x", "u1"), ("y", "u1"), ("high", "u1"), ("low", ">u2")]))
    overflows = raw["y"] == _OVERFLOW_ROW
    t = (raw["high"] & np.int64(0x7F)) << 16 | raw["low"]
    t += np.cumsum(overflows) * _OVERFLOW_TIME
    events = Events.make(t, raw["x"], raw["y"], raw["high"] >> 7)[~overflows]
    return Recording(events, sensor or N_MNIST)


def _read_aedat4(data: bytes, path: str) -> Recording:
    """Event stream of an AEDAT 4 file. It must be the only one; frames, triggers and the motion sensor are left out."""
    # Looked at before faery 0.7.1 sees it: a compiled decoder can end the process with a damaged one.
    (size,) = struct.unpack_from("<I", data.ljust(len(_AEDAT4) + 4, b"\0"), len(_AEDAT4))
    data[len(_AEDAT4) + 4 :][:size].partition(b"<")[2].rpartition(b">")[0].decode()
    with _faery(path) as faery, faery.aedat.Decoder(path) as decoder:
        tracks = [track for track in decoder.tracks() if track.data_type == "events"]
        if len(tracks) != 1:
            raise ValueError(f"has {len(tracks)} event streams; exactly one can be read")
        width, height = tracks[0].dimensions
        parts: list[Events] = []
        size = 0
        for track, packet in decoder:
            if track.id == tracks[0].id:
                size += EVENT_BYTES * len(packet)
                require_size("its events", size)
                parts.append(Events.make(packet["t"], packet["x"], packet["y"], packet["on"]))
    joined = (np.concatenate([getattr(part, field) for part in parts] or [[]]) for field in ("t", "x", "y", "p"))
    return Recording(Events.make(*joined), SensorSize(height, width))


@contextmanager
def _faery(path: str) -> Iterator[Any]:
    """Module faery; its errors about a file become ValueErrors."""
    try:
        import faery
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{path}: faery reads it: pip install megasnn[events]", name="faery") from error
    try:
        yield faery
    except BaseException as error:
        # A panic of Rust is no Exception, and has no class that can be imported.
        if isinstance(error, RuntimeError) or type(error).__name__ == "PanicException":
            raise ValueError(f"cannot be decoded ({error})") from error
        raise
