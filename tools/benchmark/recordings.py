"""Recordings of random events as files of the formats that can be written here."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megasnn.events import Events, SensorSize
from megasnn.events.aedat3 import PACKET_HEADER, POLARITY

PACKET_EVENTS = 4096
LONGEST_GAP = 2  # microseconds between two events


def random_events(count: int, sensor: SensorSize) -> Events:
    random = np.random.default_rng(0)
    return Events.make(
        np.cumsum(random.integers(0, LONGEST_GAP + 1, count)),
        random.integers(0, sensor.width, count),
        random.integers(0, sensor.height, count),
        random.integers(0, 2, count),
    )


def write_files(events: Events, sensor: SensorSize, folder: Path) -> dict[str, Path]:
    """One file of `events` for each format, by the format's name."""
    files = {
        "AEDAT 2.0": ("a.aedat", _aedat2(events)),
        "AEDAT 3.1": ("b.aedat", _aedat3(events)),
        "N-MNIST": ("a.bin", _atis(events)),
    }
    paths = {}
    for name, (file, data) in files.items():
        paths[name] = folder / file
        paths[name].write_bytes(data)
    paths["NumPy, not compressed"] = folder / "a.npz"
    np.savez(folder / "a.npz", t=events.t, x=events.x, y=events.y, p=events.p)
    return paths


def _aedat2(events: Events) -> bytes:
    body = np.empty((len(events), 2), ">u4")
    body[:, 0] = (127 - events.x.astype(np.uint32)) << 8 | (127 - events.y.astype(np.uint32)) << 1 | (1 - events.p)
    body[:, 1] = events.t
    return b"#!AER-DAT2.0\r\n" + body.tobytes()


def _aedat3(events: Events) -> bytes:
    body = np.empty((len(events), 2), "<u4")
    body[:, 0] = events.x.astype(np.uint32) << 17 | events.y.astype(np.uint32) << 2 | events.p << 1 | 1
    body[:, 1] = events.t
    parts = [b"#!AER-DAT3.1\r\n#Source 1: DVS128\r\n#!END-HEADER\r\n"]
    for first in range(0, len(body), PACKET_EVENTS):
        packet = body[first : first + PACKET_EVENTS]
        header = np.zeros(1, PACKET_HEADER)
        header["type"], header["size"] = POLARITY, body.itemsize * 2
        for field in ("capacity", "number", "valid"):
            header[field] = len(packet)
        parts += [header.tobytes(), packet.tobytes()]
    return b"".join(parts)


def _atis(events: Events) -> bytes:
    """Times wrap after 2^23 us, which the format cannot say otherwise: the events are spread evenly below that."""
    t = np.arange(len(events)) * (2**23 - 1) // len(events)
    columns = [events.x, events.y, events.p.astype(np.int64) << 7 | t >> 16, t >> 8 & 0xFF, t & 0xFF]
    return np.stack(columns, axis=1).astype(np.uint8).tobytes()
