"""Reads recordings: AEDAT 2 and 3 (`megasnn.data.events.aedat`), N-MNIST and NumPy here; AEDAT 4, DAT and EVT by faery.

Faery is optional (``pip install megasnn[events]``). It gives an event that comes late the time of the one before it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasnn.common.files import read_arrays, read_file, require_size
from megasnn.data.events.aedat import decode_aedat2, decode_aedat3
from megasnn.data.events.frames import LARGEST_SIDE, Events, Recording, RecordingError, SensorSize, check_recording

RECORDING_SUFFIXES = (".aedat", ".aedat4", ".bin", ".bs2", ".npz", ".dat", ".raw")
"""Endings of the files that `read_recording` recognises."""

N_MNIST = SensorSize(34, 34)
_OVERFLOW_ROW = 240  # a row that no such sensor has
_OVERFLOW_TIME = 1 << 13

_RANGES = {"t": (-(1 << 61), 1 << 61), "x": (0, LARGEST_SIDE - 1), "y": (0, LARGEST_SIDE - 1), "p": (-1, 1)}
_EVENT_BYTES = 13  # in memory, see `Events`

_NO_SIZE = "does not say the size of its sensor; pass it (--sensor-size HEIGHT WIDTH)"
_AEDAT4 = b"#!AER-DAT4.0\r\n"


def read_recording(
    path: str | PathLike[str], sensor_size: tuple[int, int] | None = None, sort: bool = False
) -> Recording:
    """Reads and checks a recording; its format follows from how it begins, for .bin, .bs2, .dat, .raw from its name.

    Args:
        sensor_size: height and width, for files that do not say it. Without it .bin and .bs2 have N-MNIST's (34, 34),
            and AEDAT 2.0 without an AEChip line is a DVS128's.
        sort: puts events in order of time instead of refusing a recording that is not: some cameras send a few late.

    Raises:
        RecordingError: the file is cut, empty, no regular file, too large, of another format or version, has no events,
            time that runs backwards or coordinates outside the sensor. Names the file and the event or byte.
        OSError: the file cannot be opened.
        ModuleNotFoundError: AEDAT 4, DAT or EVT without faery.
    """
    name = fspath(path)
    sensor = SensorSize(*sensor_size) if sensor_size is not None else None
    try:
        return check_recording(_decode(read_file(Path(path)), name, sensor), sort)
    except ValueError as error:
        raise RecordingError(f"{name}: {error}") from error


def _decode(data: bytes, name: str, sensor: SensorSize | None) -> Recording:
    if data.startswith(b"#!AER-DAT2.0"):
        return decode_aedat2(data, sensor)
    if data.startswith(b"#!AER-DAT3.1"):
        return decode_aedat3(data, sensor)
    if data.startswith(_AEDAT4):
        return _read_aedat4(data, name)
    if data.startswith(b"PK\x03\x04"):
        return recording_of_arrays(read_arrays(data), sensor)
    suffix = Path(name).suffix.lower()
    if data and suffix in (".bin", ".bs2"):
        return _decode_n_mnist(data, sensor)
    if data and suffix in (".dat", ".raw"):
        return _read_prophesee(name, sensor)
    raise ValueError(
        f"is no recording of a known format (begins with {data[:12]!r}); AEDAT 2.0, 3.1 and 4, DAT, EVT, N-MNIST and "
        ".npz files are read"
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


def recording_of_arrays(arrays: Mapping[str, NDArray], sensor: SensorSize | None = None) -> Recording:
    """Recording of arrays t, x, y, p (0 and 1, or -1 and 1), and perhaps height and width. Its order is not checked.

    Raises:
        ValueError: an array is missing, or holds what is no event.
    """
    if missing := [name for name in _RANGES if name not in arrays]:
        raise ValueError(f"has no array {missing[0]}; it has {', '.join(arrays) or 'none'}")
    require_size("its events", _EVENT_BYTES * arrays["t"].size)
    for name, (least, most) in _RANGES.items():
        values = arrays[name]
        if values.dtype.kind not in "iub" or values.ndim != 1 or len(values) != len(arrays["t"]):
            raise ValueError(
                f"{name} must be integers (time in microseconds) of one dimension and as many as t, not "
                f"{values.dtype} {list(values.shape)}"
            )
        wrong = (values < least) | (values > most)
        if wrong.any():
            index = int(wrong.argmax())
            raise ValueError(f"{name} = {values[index]} at event {index} is not in {least}..{most}")
    if "height" in arrays and "width" in arrays:
        sides = [arrays[side].item() if arrays[side].size == 1 else 0 for side in ("height", "width")]
        if any(not isinstance(side, int) or not 0 < side <= LARGEST_SIDE for side in sides):
            raise ValueError(f"height and width must be integers from 1 to {LARGEST_SIDE}, they are {sides}")
        sensor = SensorSize(*sides)
    if sensor is None:
        raise ValueError(_NO_SIZE)
    return Recording(Events.make(arrays["t"], arrays["x"], arrays["y"], arrays["p"] > 0), sensor)


def _read_aedat4(data: bytes, path: str) -> Recording:
    """Event stream of an AEDAT 4 file. It must be the only one; frames, triggers and the motion sensor are left out."""
    # On a description of the streams that is no UTF-8, faery 0.7.1 ends the process.
    (size,) = struct.unpack_from("<I", data.ljust(len(_AEDAT4) + 4, b"\0"), len(_AEDAT4))
    data[len(_AEDAT4) + 4 :][:size].partition(b"<")[2].rpartition(b">")[0].decode()
    with _faery(path) as faery, faery.aedat.Decoder(path) as decoder:
        tracks = [track for track in decoder.tracks() if track.data_type == "events"]
        if len(tracks) != 1:
            raise ValueError(f"has {len(tracks)} event streams; exactly one can be read")
        width, height = tracks[0].dimensions
        packets = (packet for track, packet in decoder if track.id == tracks[0].id)
        return _recording_of_packets(packets, "on", SensorSize(height, width))


def _read_prophesee(path: str, sensor: SensorSize | None) -> Recording:
    """DAT (.dat) and EVT 2, 2.1 and 3 (.raw) files; one that was cut ends at its last whole event."""
    is_dat = path.lower().endswith(".dat")
    fallback = (0, 0) if sensor is None else (sensor.width, sensor.height)
    with _faery(path) as faery, (faery.dat if is_dat else faery.evt).Decoder(path, fallback, None) as decoder:
        if is_dat and decoder.event_type != "cd":
            raise ValueError(f"holds events of type {decoder.event_type!r}; only cd (contrast) is read")
        width, height = decoder.dimensions
        if not width or not height:
            raise ValueError(_NO_SIZE)
        packets = decoder if is_dat else (packet["events"] for packet in decoder if "events" in packet)
        return _recording_of_packets(packets, "payload" if is_dat else "on", SensorSize(height, width))


def _recording_of_packets(packets: Iterator[NDArray], polarity: str, sensor: SensorSize) -> Recording:
    """Joins packets of events; stops, before it takes the next one, where they are too many for a sample."""
    parts: list[Events] = []
    size = 0
    for packet in packets:
        size += _EVENT_BYTES * len(packet)
        require_size("its events", size)
        parts.append(Events.make(packet["t"], packet["x"], packet["y"], packet[polarity] > 0))
    joined = (np.concatenate([getattr(part, field) for part in parts] or [[]]) for field in ("t", "x", "y", "p"))
    return Recording(Events.make(*joined), sensor)


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
