"""Small recordings as files of every format, written independently of the readers; and SpikingJelly's readers."""

from __future__ import annotations

import io
import struct
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import numpy as np
import spikingjelly
from hypothesis import strategies as st

from megasnn.data.events import Events

AEDAT2_LINES = ("#!AER-DAT2.0", "# This is a raw AE data file - do not edit", "# Timestamps tick is 1 us")
AEDAT3_LINES = ("#!AER-DAT3.1", "#Format: RAW", "#Source 1: DVS128", "#!END-HEADER")


def random_events(count: int, height: int, width: int, seed: int = 0, longest_gap: int = 50) -> Events:
    random = np.random.default_rng(seed)
    return Events.make(
        np.cumsum(random.integers(0, longest_gap + 1, count)),
        random.integers(0, width, count),
        random.integers(0, height, count),
        random.integers(0, 2, count),
    )


def event_lists(height: int, width: int, longest_time: int, least: int = 1) -> st.SearchStrategy[Events]:
    """Events in order of time with the extremes of what a format can say among them."""
    event = st.tuples(
        st.integers(0, longest_time), st.integers(0, width - 1), st.integers(0, height - 1), st.integers(0, 1)
    )
    return st.lists(event, min_size=least, max_size=60).map(
        lambda rows: Events.make(*np.array(sorted(rows), int).reshape(-1, 4).T)
    )


def equal(one: Events, other: Events) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        and getattr(one, name).dtype == getattr(other, name).dtype
        for name in ("t", "x", "y", "p")
    )


def text(lines: Sequence[str]) -> bytes:
    return "".join(f"{line}\r\n" for line in lines).encode()


def dvs128_address(events: Events) -> np.ndarray:
    """Columns are counted from the right and rows from the bottom, as jAER's class DVS128 has them."""
    x_bits, y_bits = 127 - events.x.astype(np.uint32), 127 - events.y.astype(np.uint32)
    return y_bits << 8 | x_bits << 1 | (1 - events.p.astype(np.uint32))


def davis_address(events: Events, height: int, width: int) -> np.ndarray:
    """Columns are counted from the right and rows from the bottom, as jAER's class DavisBaseCamera has them."""
    x_bits, y_bits = width - 1 - events.x.astype(np.uint32), height - 1 - events.y.astype(np.uint32)
    return y_bits << 22 | x_bits << 12 | events.p.astype(np.uint32) << 11


def aedat2(address: np.ndarray, t: np.ndarray, lines: Sequence[str] = AEDAT2_LINES) -> bytes:
    body = np.stack([address, t.astype(np.uint32)], axis=1).astype(">u4")
    return text(lines) + body.tobytes()


def aedat3_packet(events: Events, overflow: int = 0, kind: int = 1, valid: np.ndarray | None = None) -> bytes:
    mark = np.ones(len(events), np.uint32) if valid is None else valid.astype(np.uint32)
    address = (
        mark | events.p.astype(np.uint32) << 1 | events.y.astype(np.uint32) << 2 | events.x.astype(np.uint32) << 17
    )
    body = np.stack([address, (events.t & 0x7FFF_FFFF).astype(np.uint32)], axis=1).astype("<u4").tobytes()
    return struct.pack("<hhiiiiii", kind, 1, 8, 4, overflow, len(events), len(events), int(mark.sum())) + body


def aedat3(packets: Sequence[bytes], lines: Sequence[str] = AEDAT3_LINES) -> bytes:
    return text(lines) + b"".join(packets)


def atis(events: Events) -> bytes:
    return b"".join(
        bytes([x, y]) + (int(p) << 23 | int(t)).to_bytes(3, "big")
        for t, x, y, p in zip(events.t, events.x, events.y, events.p, strict=True)
    )


def npz(events: Events, height: int, width: int) -> bytes:
    file = io.BytesIO()
    np.savez(file, t=events.t, x=events.x, y=events.y, p=events.p, height=height, width=width)
    return file.getvalue()


def npy(events: Events) -> bytes:
    """A structured array, as tonic and Prophesee's tools have their events."""
    kinds = np.dtype([("x", "<u2"), ("y", "<u2"), ("p", "<i2"), ("t", "<i8")])
    array = np.empty(len(events), kinds)
    for name in "xypt":
        array[name] = getattr(events, name)
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


AEDAT4_INFO = """<dv version="2.0"><node name="outInfo" path="/outInfo/"><node name="0" path="/outInfo/0/">
<attr key="compression" type="string">NONE</attr><attr key="typeIdentifier" type="string">EVTS</attr>
<node name="info" path="/outInfo/0/info/"><attr key="sizeX" type="int">{width}</attr>
<attr key="sizeY" type="int">{height}</attr></node></node></node></dv>"""


def aedat4(packets: Sequence[Events], height: int, width: int) -> bytes:
    """Packets without compression, and a table of packets of which only the position matters."""
    bodies = b"".join(_aedat4_packet(events) for events in packets)
    length = len(_aedat4_header(0, height, width))
    return _aedat4_header(length + len(bodies), height, width) + bodies + struct.pack("<I", 4) + bytes(4)


def _aedat4_header(table: int, height: int, width: int) -> bytes:
    info = AEDAT4_INFO.format(height=height, width=width).encode()
    fields = struct.pack("<HHHHHxx", 10, 20, 16, 8, 4)  # offsets of compression, position, text inside the root
    # After the size of the buffer: offset of the root, name, fields, then the root itself.
    root = struct.pack("<iIqi", len(fields), 16, table, 0)
    buffer = struct.pack("<I4s", 8 + len(fields), b"IOHE") + fields + root + struct.pack("<I", len(info)) + info + b"\0"
    return b"#!AER-DAT4.0\r\n" + struct.pack("<I", len(buffer)) + buffer


def _aedat4_packet(events: Events) -> bytes:
    fields = struct.pack("<HHH2x", 6, 8, 4)
    root = struct.pack("<iI", len(fields), 8)
    vector = struct.pack("<I", len(events)) + b"".join(
        struct.pack("<qhh?xxx", t, x, y, p) for t, x, y, p in zip(events.t, events.x, events.y, events.p, strict=True)
    )
    # The vector's first event must lie at a multiple of 8 bytes.
    buffer = struct.pack("<I4s", 8 + len(fields), b"EVTS") + fields + root + bytes(4) + vector
    return struct.pack("<ii", 0, len(buffer) + 4) + struct.pack("<I", len(buffer)) + buffer


def write(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


_NAMES = {"DatasetFolder": object} | dict.fromkeys(("transforms", "check_integrity", "download_url", "extract_archive"))


@cache
def spikingjelly_module(name: str) -> ModuleType:
    """Module of `spikingjelly.datasets`: utils, or cifar10_dvs, which reads AEDAT 2.0."""
    package, torchvision = ModuleType("spikingjelly.datasets"), SimpleNamespace(**_NAMES)
    package.__path__ = [str(Path(spikingjelly.__file__).parent / "datasets")]
    places = ["torchvision", "torchvision.datasets", "torchvision.datasets.utils"]
    with patch.dict(sys.modules, {"spikingjelly.datasets": package, **dict.fromkeys(places, torchvision)}):
        return import_module(f"spikingjelly.datasets.{name}")
