"""DAT, Prophesee's format for N-CARS and GEN1: a text header, then events in 8 bytes each.

Source: Prophesee's page on DAT.
"""

from __future__ import annotations

import numpy as np

from megasnn.common.files import require_size
from megasnn.data.events.clock import unwrap
from megasnn.data.events.frames import EVENT_BYTES, Events, Recording, SensorSize
from megasnn.data.events.header import read_header

_KINDS = (0, 12)  # Event2d (N-CARS, GEN1) and EventCD have one layout
_EVENT_BYTES = 8
_VERSION = "2"
_CLOCK_BITS = 32  # wraps after 71.6 minutes


def decode_dat(data: bytes, sensor: SensorSize | None = None) -> Recording:
    """Decodes DAT: a header, a byte for the kind of events, a byte for their size, events.

    Args:
        sensor: for headers without a size.

    Raises:
        ValueError: cut, too large, another version or event kind, or no sensor size.
    """
    header = read_header(data)
    # Some files have no `% Version`.
    version = header.fields.get("version", _VERSION)
    if version != _VERSION:
        raise ValueError(f"is DAT of version {version!r}; only version {_VERSION} is read")
    kind_and_size = data[header.end : header.end + 2]
    if len(kind_and_size) < 2:
        raise ValueError(f"is cut: it ends inside its header, at byte {len(data)}")
    kind, size = kind_and_size
    if kind not in _KINDS or size != _EVENT_BYTES:
        raise ValueError(
            f"holds events of kind {kind} and {size} bytes; only contrast events are read, kind 0 or 12 with "
            f"{_EVENT_BYTES} bytes"
        )
    start = header.end + 2
    rest = (len(data) - start) % _EVENT_BYTES
    if rest:
        raise ValueError(
            f"is cut: it ends inside an event of {_EVENT_BYTES} bytes; remove its last {rest} bytes to read it"
        )
    words = np.frombuffer(data, "<u4", offset=start).reshape(-1, 2)
    require_size("its events", EVENT_BYTES * len(words))
    # Time in microseconds; x (14 bits), y (14), polarity (4).
    t, word = words.T
    events = Events.make(unwrap(t, _CLOCK_BITS), word & 0x3FFF, word >> 14 & 0x3FFF, word >> 28 != 0)
    return Recording(events, header.sensor(sensor))
