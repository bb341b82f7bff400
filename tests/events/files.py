"""Small recordings as files of every format, written independently of the readers."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import faery
import numpy as np
from hypothesis import strategies as st

from megasnn.events import Events

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
    x_bits, y_bits = 127 - events.y.astype(np.uint32), 127 - events.x.astype(np.uint32)
    return y_bits << 8 | x_bits << 1 | (1 - events.p.astype(np.uint32))


def davis_address(events: Events) -> np.ndarray:
    return events.y.astype(np.uint32) << 22 | events.x.astype(np.uint32) << 12 | events.p.astype(np.uint32) << 11


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


def dat2(events: Events, size: tuple[int, int] | None) -> bytes:
    """Prophesee's DAT: t 32 bits; x 14 bits, y 14, polarity 4. Source: Prophesee's page on the DAT format."""
    word = events.x.astype(np.uint32) | events.y.astype(np.uint32) << 14 | events.p.astype(np.uint32) << 28
    size_lines = [f"% Height {size[0]}", f"% Width {size[1]}"] if size else []
    header = "".join(f"{line}\n" for line in ["% Data file containing CD events.", "% Version 2", *size_lines])
    return header.encode() + bytes([0x0C, 8]) + np.stack([events.t.astype(np.uint32), word], axis=1).tobytes()


def evt3(events: Events, size: tuple[int, int]) -> bytes:
    """EVT 3.0: words of a type (0 y, 2 x, 6 and 8 lower and upper half of the time) and 12 bits; x has polarity too."""
    words = []
    for t, x, y, p in zip(*(getattr(events, name).tolist() for name in "txyp"), strict=True):
        words += [8 << 12 | t >> 12, 6 << 12 | t & 0xFFF, y, 2 << 12 | p << 11 | x]
    header = f"% evt 3.0\n% format EVT3;width={size[1]};height={size[0]}\n% end\n"
    return header.encode() + np.array(words, "<u2").tobytes()


def aedat4(events: Events, height: int, width: int) -> bytes:
    """As faery writes it, but for the width: faery refuses to write events beside it."""
    array = np.zeros(len(events), faery.EVENTS_DTYPE)
    array["t"], array["x"], array["y"], array["on"] = events.t, events.x, events.y, events.p
    with TemporaryDirectory() as folder:
        path = Path(folder, "a.aedat4")
        stream = faery.events_stream_from_array(array, (900 + width, height))
        stream.to_file(path, zero_t0=False, compression=None)
        return path.read_bytes().replace(f">{900 + width}<".encode(), f">{width:03}<".encode())


def write(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path
